"""What the latent world model promises: it learns dynamics and outcome of chunks, failures included, and resumes exactly."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.world_model.conftest import CHUNK, STARTS, advance, build_model, record_rollouts
from wmrl.statistics import auroc
from wmrl.types import Status
from world_model.latent import LatentConfig, LatentWorldModel, Transitions, states_of


def test_transitions_hold_every_taken_decision_and_no_end_state_of_a_success() -> None:
    real = record_rollouts(STARTS[:50])
    data = Transitions.of(real)
    assert len(data) == int((real.mask > 0).sum())
    assert data.success.sum() == real.returns().sum()
    assert torch.equal(data.continues, 1 - data.success)
    following, _ = advance(data.state, data.chunk.unflatten(1, (CHUNK, -1)))
    goes_on = data.continues > 0
    assert torch.allclose(data.following[goes_on], following[goes_on], atol=1e-6)


def test_rollouts_without_an_outcome_teach_nothing() -> None:
    real = record_rollouts(STARTS[:10])
    broken = replace(real, status=torch.full_like(real.status, int(Status.INFRASTRUCTURE)))
    assert len(Transitions.of(broken)) == 0


def test_it_predicts_unseen_rollouts(fitted: LatentWorldModel) -> None:
    real = record_rollouts(STARTS[300:], seed=1)
    estimate = fitted.predict(real)
    assert auroc(estimate.mean, real.returns()) > 0.9
    assert abs(estimate.mean.mean().item() - real.returns().mean().item()) < 0.1
    assert (estimate.epistemic >= 0).all() and (estimate.stochastic == 0).all()
    state, data = states_of(real)[:, 0], Transitions.of(real)
    predicted, _ = fitted.network(data.state.expand(3, -1, -1), data.chunk.expand(3, -1, -1))
    error = (predicted.mean(0) - data.following)[data.continues > 0]
    assert error.square().mean() < 0.1 * state.square().mean()


def test_members_disagree_more_far_from_the_data(fitted: LatentWorldModel) -> None:
    near = states_of(record_rollouts(STARTS[300:]))[:, 0]
    spread = []
    for scale, action in ((1.0, 0.0), (4.0, 3.0)):  # far: states four times as large, actions three times beyond their limits
        chunk = torch.full((3, len(near), CHUNK * 3), action)
        spread.append(fitted.network((near * scale).expand(3, -1, -1), chunk)[0].var(0).mean().item())
    assert spread[1] > 1.5 * spread[0]


def test_fit_steps_grow_with_the_data_and_the_version_counts_fits() -> None:
    model = build_model(passes=3.0, refresh_passes=1.0)
    small = model.fit(record_rollouts(STARTS[:20]), seed=0)
    large = model.fit(record_rollouts(STARTS[:200]), seed=1)
    assert model.version == 2
    assert small["fit_steps"] == max(1, round(3.0 * small["transitions"] / 64))
    assert large["fit_steps"] == round(1.0 * large["transitions"] / 64)


def test_a_resumed_fit_equals_the_uninterrupted_one() -> None:
    real = record_rollouts(STARTS[:40])
    whole, second = build_model(passes=2.0), build_model(passes=2.0)
    whole.fit(real, seed=0)
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert whole.fit(real, seed=1) == second.fit(real, seed=1)
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name]), name


def test_pieces_of_several_chunks_see_as_many_chunks_and_never_leave_their_rollout() -> None:
    real = record_rollouts(STARTS[:60])
    for unroll in (1, 3):
        losses = build_model(passes=3.0, unroll=unroll).fit(real, seed=0)
        assert losses["fit_steps"] == max(1, round(3.0 * losses["transitions"] / 64))
    poisoned = replace(real, inputs={n: t.masked_fill((real.mask == 0)[..., None], 1e6) for n, t in real.inputs.items()})
    whole, second = build_model(passes=2.0, unroll=4), build_model(passes=2.0, unroll=4)
    assert whole.fit(real, seed=0) == second.fit(poisoned, seed=0)


def test_one_member_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 ensemble members"):
        LatentConfig(members=1)
