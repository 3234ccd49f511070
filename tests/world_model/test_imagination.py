"""What imagination promises: soft endings that multiply up, real beginnings, an episode's own deadline, and nothing non-finite
passed on as an outcome."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.world_model.conftest import (
    ACTIONS,
    CHUNK,
    FEATURES,
    HORIZON,
    PROPRIO,
    SIZES,
    STARTS,
    WITH_GOAL,
    beginnings,
    build_model,
    record_rollouts,
)
from wmrl.collect import collect
from wmrl.keyframes import keyframe
from wmrl.types import Decision, Observation, Status
from world_model.imagination import ImaginedEnvironment
from world_model.latent import LatentWorldModel
from world_model.network import ChunkEnsemble


class ConstantHazard(ChunkEnsemble):
    """Stands still; the two members see success probabilities 0.2 and 0.4 in every chunk. A chunk that begins with more than
    0.9 leads out of the finite."""

    def __init__(self) -> None:
        super().__init__(FEATURES, PROPRIO, (CHUNK, ACTIONS), members=2, width=4)

    def residual(self, regressors: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
        logit = torch.tensor([0.2, 0.4]).logit()[:, None].expand(2, outcome.shape[1])
        change = torch.where(outcome[..., PROPRIO, None] > 0.9, torch.nan, 0.0)
        return change.expand(-1, -1, FEATURES + PROPRIO), logit


class Still:
    """A policy that does nothing."""

    noise_size = 1

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        rows = len(observation["features"])
        return Decision(torch.zeros(rows, CHUNK, ACTIONS), torch.zeros(rows, 1), {"features": observation["features"]})

    def log_prob(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        return torch.zeros(actions.shape[:-2] + (1,))


def constant_world(width: int) -> ImaginedEnvironment:
    return ImaginedEnvironment(ConstantHazard(), sizes=SIZES, horizon=HORIZON, beginnings=beginnings, width=width)


def play(first_action: float) -> dict[str, Any]:
    """Two rows to the deadline: rewards (T, 2) and alive (T, 2), status and variance (2,) after the last chunk."""
    environment = constant_world(2)
    environment.reset(STARTS[:2])
    actions = torch.zeros(2, CHUNK, ACTIONS)
    actions[0, 0, 0] = first_action
    steps = [environment.step(actions) for _ in range(HORIZON)]
    rewards, alive = (torch.stack([getattr(step, name) for step in steps]) for name in ("reward", "alive"))
    return {"rewards": rewards, "alive": alive, "status": steps[-1].status.tolist(), "variance": steps[-1].variance}


def test_survival_multiplies_and_rewards_are_the_expected_success() -> None:
    played = play(0.0)
    assert played["alive"][:, 0].tolist() == pytest.approx([0.7, 0.7**2, 0.7**3, 0.0])  # nothing runs on past the deadline
    assert played["rewards"][:, 1].tolist() == pytest.approx([0.3, 0.3 * 0.7, 0.3 * 0.7**2, 0.3 * 0.7**3])
    assert played["rewards"].sum(0).tolist() == pytest.approx([1 - 0.7**4] * 2)
    assert played["status"] == [Status.SUCCESS, Status.SUCCESS]
    assert played["variance"][0].item() == pytest.approx(torch.tensor([0.8**4, 0.6**4]).var().item())


def test_a_non_finite_state_is_censored_and_never_rewarded() -> None:
    played = play(1.0)
    assert played["status"] == [Status.CENSORED, Status.SUCCESS]
    assert played["rewards"][:, 0].tolist() == played["alive"][:, 0].tolist() == [0.0] * HORIZON
    assert played["rewards"][:, 1].sum().item() == pytest.approx(1 - 0.7**4)
    assert played["variance"][0].item() == 0.0


def test_a_keyframe_keeps_the_deadline_of_its_episode() -> None:
    """One wave of beginnings after 0, 1, 2 and 3 of 4 decisions."""
    starts = [STARTS[0], *(keyframe(STARTS[0], 7, decision) for decision in range(1, HORIZON))]
    imagined = collect(constant_world(HORIZON), Still(), starts, [0] * HORIZON, seed=0)
    left = [HORIZON - decision for decision in range(HORIZON)]
    assert (imagined.mask > 0).sum(1).tolist() == left
    for mask, decisions in zip(imagined.mask.tolist(), left, strict=True):
        assert mask == pytest.approx([0.7**t for t in range(decisions)] + [0.0] * (HORIZON - decisions))
    assert imagined.returns().tolist() == pytest.approx([1 - 0.7**decisions for decisions in left])
    assert imagined.status.tolist() == [Status.SUCCESS] * 3 + [Status.TIME_LIMIT]  # 0.7 of the last one still runs
    assert imagined.variance is not None
    expected = [torch.tensor([0.8**decisions, 0.6**decisions]).var().item() for decisions in left]
    assert imagined.variance.tolist() == pytest.approx(expected)


def test_a_row_past_its_deadline_stands_still(fitted: LatentWorldModel) -> None:
    world = fitted.environment()
    world.reset([keyframe(STARTS[0], 0, HORIZON - 1), *STARTS[:7]])
    actions = torch.full((8, CHUNK, ACTIONS), 0.3)
    last, after = world.step(actions), world.step(actions)
    for name in SIZES:
        assert torch.equal(last.observation[name][0], after.observation[name][0])
        assert (last.observation[name][1:] != after.observation[name][1:]).any()
    assert last.reward[0] > 0 and after.reward[0] == 0 and last.status[0] == after.status[0]


@pytest.mark.parametrize("sizes", [SIZES, WITH_GOAL])
def test_imagination_begins_at_real_states_with_every_entry_and_is_repeatable(sizes: dict[str, int]) -> None:
    model = build_model(sizes, passes=1.0)
    model.fit(record_rollouts(STARTS[:20]), seed=0)
    environment = model.environment()
    first, real = environment.reset(STARTS[:8]), beginnings(STARTS[:8])
    assert set(first) == {*sizes, "language"} and all(torch.equal(first[name], real[name]) for name in first)
    actions = torch.full((8, CHUNK, ACTIONS), 0.3)
    once = environment.step(actions)
    environment.reset(STARTS[:8])
    again = environment.step(actions)
    assert torch.equal(once.reward, again.reward)
    assert set(once.observation) == set(first) and not torch.equal(once.observation["features"], first["features"])
    assert all(torch.equal(once.observation[name], again.observation[name]) for name in sizes)
