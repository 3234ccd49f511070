"""A linear latent world with known rules of success, recorded as rollouts.

Shape legend: B rows, S state = 4 features, 2 numbers of proprioception, 1 of the goal, C numbers of a chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from wmrl.types import Observation, Rollouts, Start, Status
from world_model.latent import LatentConfig, LatentWorldModel

FEATURES, PROPRIO, CHUNK, ACTIONS, HORIZON = 4, 2, 2, 3, 4
SIZES = {"features": FEATURES, "proprio": PROPRIO}
WITH_GOAL = {**SIZES, "goal": 1}
STARTS = tuple(Start("toy", seed, "go") for seed in range(400))

Rule = Callable[[Tensor, Tensor], Tensor]
"""state (B, S), chunk (B, C) -> success (B,) bool."""


def beginnings(starts: Sequence[Start]) -> Observation:
    """State of a start: keyed by its seed."""
    rows = [torch.randn(sum(WITH_GOAL.values()), generator=torch.Generator().manual_seed(start.seed)) for start in starts]
    return {**entries(torch.stack(rows)), "language": torch.zeros(len(starts), 1)}


def entries(state: Tensor) -> dict[str, Tensor]:
    """State (..., S) by entry."""
    return dict(zip(WITH_GOAL, state.split(list(WITH_GOAL.values()), dim=-1), strict=True))


def advance(state: Tensor, chunk: Tensor) -> Tensor:
    """The truth, for states (B, S) with or without the goal: linear in the state and in the first action of the chunk."""
    following, first = state.clone(), chunk.flatten(1)[:, :ACTIONS]
    following[:, :FEATURES] *= 0.9
    following[:, :3] += 0.5 * first
    following[:, FEATURES : FEATURES + PROPRIO] = 0.8 * state[:, FEATURES : FEATURES + PROPRIO] + 0.5 * first[:, 1:]
    return following


def well_placed(state: Tensor, chunk: Tensor) -> Tensor:
    """The first action of the chunk is large while the first number of proprioception is positive."""
    return (state[:, FEATURES] > 0) & (chunk.flatten(1)[:, 0] > 0.5)


def goal_is_positive(state: Tensor, chunk: Tensor) -> Tensor:
    """Whatever the policy sees and does."""
    return state[:, -1] > 0


def record_rollouts(starts: Sequence[Start], *, seed: int = 0, rule: Rule = well_placed) -> Rollouts:
    """Random actions in the true world; success ends a rollout."""
    generator = torch.Generator().manual_seed(seed)
    first = beginnings(starts)
    state = torch.cat([first[name] for name in WITH_GOAL], 1)
    rows = len(starts)
    alive = torch.ones(rows, dtype=torch.bool)
    states, actions, rewards, mask = [], [], [], []
    for _ in range(HORIZON):
        chunk = torch.rand(rows, CHUNK, ACTIONS, generator=generator) * 2 - 1
        success = rule(state, chunk)
        states.append(state)
        actions.append(chunk)
        mask.append(alive.float())
        rewards.append((success & alive).float())
        state = torch.where(alive[:, None], advance(state, chunk), state)
        alive = alive & ~success
    status = torch.where(alive, int(Status.TIME_LIMIT), int(Status.SUCCESS))
    zeros = torch.zeros(rows, HORIZON, 1)
    return Rollouts(
        starts=tuple(starts),
        member=torch.zeros(rows, dtype=torch.long),
        actions=torch.stack(actions, 1),
        inputs={**entries(torch.stack(states, 1)), "language": zeros},
        final={**entries(state), "language": zeros[:, 0]},
        log_probs=zeros,
        token_mask=torch.ones_like(zeros, dtype=torch.bool),
        rewards=torch.stack(rewards, 1),
        mask=torch.stack(mask, 1),
        status=status,
        seconds=torch.zeros(rows),
    )


def build_model(sizes: Mapping[str, int] = SIZES, **changes: Any) -> LatentWorldModel:
    """A model small enough for a test."""
    config = LatentConfig(**{"width": 32, "passes": 60.0, "min_steps": 1, "members": 3, "batch_size": 64, **changes})
    return LatentWorldModel(config, sizes=sizes, chunk=(CHUNK, ACTIONS), horizon=HORIZON, beginnings=beginnings, width=8)


@pytest.fixture(scope="session")
def fitted() -> LatentWorldModel:
    """Fitted once for all tests that only look."""
    model = build_model()
    model.fit(record_rollouts(STARTS[:300]), seed=0)
    return model
