"""A linear latent world with a known success rule, recorded as rollouts."""

from collections.abc import Sequence

import pytest
import torch

from wmrl.types import Observation, Rollouts, Start, Status
from world_model.latent import LatentConfig, LatentWorldModel

FEATURES, PROPRIO, CHUNK, ACTIONS, HORIZON = 4, 2, 2, 3, 4
STARTS = tuple(Start("toy", seed, "go") for seed in range(400))


def beginnings(starts: Sequence[Start]) -> Observation:
    """State of a start: keyed by its seed."""
    rows = [torch.randn(FEATURES + PROPRIO, generator=torch.Generator().manual_seed(start.seed)) for start in starts]
    state = torch.stack(rows)
    return {"features": state[:, :FEATURES], "proprio": state[:, FEATURES:], "language": torch.zeros(len(starts), 1)}


def advance(state: torch.Tensor, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The truth: a linear move, success when the first action of the chunk is large while the first feature is positive."""
    following = state.clone()
    following[:, :3] += 0.5 * chunk.flatten(1)[:, :3]
    return following, (state[:, 0] > 0) & (chunk.flatten(1)[:, 0] > 0.5)


def record_rollouts(starts: Sequence[Start], *, seed: int = 0) -> Rollouts:
    """Random actions in the true world; success ends a rollout."""
    generator = torch.Generator().manual_seed(seed)
    first = beginnings(starts)
    state = torch.cat([first["features"], first["proprio"]], 1)
    rows = len(starts)
    alive = torch.ones(rows, dtype=torch.bool)
    states, actions, rewards, mask = [], [], [], []
    for _ in range(HORIZON):
        chunk = torch.rand(rows, CHUNK, ACTIONS, generator=generator) * 2 - 1
        following, success = advance(state, chunk)
        states.append(state)
        actions.append(chunk)
        mask.append(alive.float())
        rewards.append((success & alive).float())
        state = torch.where(alive[:, None], following, state)
        alive = alive & ~success
    seen = torch.stack(states, 1)
    status = torch.where(alive, int(Status.TIME_LIMIT), int(Status.SUCCESS))
    zeros = torch.zeros(rows, HORIZON, 1)
    return Rollouts(
        starts=tuple(starts),
        member=torch.zeros(rows, dtype=torch.long),
        actions=torch.stack(actions, 1),
        inputs={"features": seen[..., :FEATURES], "proprio": seen[..., FEATURES:], "language": zeros},
        final={"features": state[:, :FEATURES], "proprio": state[:, FEATURES:], "language": zeros[:, 0]},
        log_probs=zeros,
        token_mask=torch.ones_like(zeros, dtype=torch.bool),
        rewards=torch.stack(rewards, 1),
        mask=torch.stack(mask, 1),
        status=status,
        seconds=torch.zeros(rows),
    )


def build_model(**changes: float) -> LatentWorldModel:
    """A model small enough for a test."""
    config = LatentConfig(**{"width": 64, "blocks": 1, "passes": 60.0, "members": 3, "batch_size": 64, **changes})  # type: ignore[arg-type]
    return LatentWorldModel(
        config, state_size=FEATURES + PROPRIO, chunk_size=CHUNK * ACTIONS, horizon=HORIZON, beginnings=beginnings, width=8
    )


@pytest.fixture(scope="session")
def fitted() -> LatentWorldModel:
    """Fitted once for all tests that only look."""
    model = build_model()
    model.fit(record_rollouts(STARTS[:300]), seed=0)
    return model
