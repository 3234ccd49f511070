"""What imagination promises: soft endings that multiply up, real beginnings, and nothing non-finite passed on as an outcome."""

import pytest
import torch

from tests.world_model.conftest import ACTIONS, CHUNK, HORIZON, STARTS, beginnings
from wmrl.types import Status
from world_model.imagination import ImaginedEnvironment
from world_model.latent import LatentWorldModel
from world_model.network import ChunkEnsemble


class ConstantHazard(ChunkEnsemble):
    """Stands still; the two members see success probabilities 0.2 and 0.4 in every chunk."""

    def __init__(self) -> None:
        super().__init__(6, CHUNK * ACTIONS, members=2, width=4, blocks=1)

    def forward(self, state: torch.Tensor, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logit = torch.tensor([0.2, 0.4]).logit()[:, None].expand(2, state.shape[1])
        return torch.where(chunk[..., :1] > 0.9, torch.nan, state), logit


def play(first_action: float) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    environment = ImaginedEnvironment(ConstantHazard(), horizon=HORIZON, beginnings=beginnings, width=2)
    environment.reset(STARTS[:2])
    actions = torch.zeros(2, CHUNK, ACTIONS)
    actions[0, 0, 0] = first_action
    rewards, alive = [], []
    for _ in range(HORIZON):
        step = environment.step(actions)
        rewards.append(step.reward)
        alive.append(step.alive)
    assert step.variance is not None
    return rewards, alive, step.status, step.variance


def test_survival_multiplies_and_rewards_are_the_expected_success() -> None:
    rewards, alive, status, variance = play(0.0)
    assert alive[-1].tolist() == pytest.approx([0.7**4] * 2)
    assert torch.stack(rewards).sum(0).tolist() == pytest.approx([1 - 0.7**4] * 2)
    assert status.tolist() == [Status.SUCCESS, Status.SUCCESS]
    assert variance[0].item() == pytest.approx(torch.tensor([0.8**4, 0.6**4]).var().item())


def test_a_non_finite_state_is_censored_and_never_rewarded() -> None:
    rewards, alive, status, _ = play(1.0)
    assert status.tolist() == [Status.CENSORED, Status.SUCCESS]
    assert torch.stack(rewards)[:, 0].tolist() == [0.0] * HORIZON
    assert alive[-1][0].item() == 0.0
    assert torch.isfinite(torch.stack(rewards)).all()


def test_imagination_begins_at_real_states_and_is_repeatable(fitted: LatentWorldModel) -> None:
    environment = fitted.environment()
    first = environment.reset(STARTS[:8])
    assert torch.equal(first["features"], beginnings(STARTS[:8])["features"])
    actions = torch.full((8, CHUNK, ACTIONS), 0.3)
    once = environment.step(actions)
    environment.reset(STARTS[:8])
    again = environment.step(actions)
    assert torch.equal(once.observation["features"], again.observation["features"]) and torch.equal(once.reward, again.reward)
