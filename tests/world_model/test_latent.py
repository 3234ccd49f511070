"""What the latent world model promises: it learns dynamics and outcome of chunks, failures included, and a fit depends on data
and seed alone."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.world_model.conftest import (
    CHUNK,
    SIZES,
    STARTS,
    WITH_GOAL,
    advance,
    build_model,
    goal_is_positive,
    record_rollouts,
    well_placed,
)
from wmrl.statistics import auroc
from wmrl.types import Rollouts, Status
from world_model.latent import LatentConfig, LatentWorldModel, Transitions, states_of


def without(rollouts: Rollouts, name: str) -> Rollouts:
    """The same, never having recorded this entry."""
    inputs, final = ({key: value for key, value in seen.items() if key != name} for seen in (rollouts.inputs, rollouts.final))
    return replace(rollouts, inputs=inputs, final=final)


def weights_equal(first: LatentWorldModel, second: LatentWorldModel) -> bool:
    ours, theirs = first.network.state_dict(), second.network.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("names", [SIZES, WITH_GOAL])
def test_transitions_hold_every_taken_decision_and_no_end_state_of_a_success(names: dict[str, int]) -> None:
    real = record_rollouts(STARTS[:50])
    data = Transitions.of(real, names)
    assert len(data) == int((real.mask > 0).sum()) and data.state.shape[1] == sum(names.values())
    assert data.success.sum() == real.returns().sum()
    assert torch.equal(data.success > 0, well_placed(data.state, data.chunk))
    assert torch.equal(data.continues, 1 - data.success)
    following = advance(data.state, data.chunk)
    goes_on = data.continues > 0
    assert torch.allclose(data.following[goes_on], following[goes_on], atol=1e-6)


def test_rollouts_without_an_outcome_teach_nothing() -> None:
    real = record_rollouts(STARTS[:10])
    broken = replace(real, status=torch.full_like(real.status, int(Status.INFRASTRUCTURE)))
    assert len(Transitions.of(broken, SIZES)) == 0
    with pytest.raises(ValueError, match="expected real rollouts with an outcome to fit a world model, got none"):
        build_model().fit(broken, seed=0)


def test_what_lies_past_the_end_of_a_rollout_is_never_read() -> None:
    real = record_rollouts(STARTS[:60])
    past = (real.mask == 0)[..., None]
    poisoned = replace(real, inputs={name: tensor.masked_fill(past, 1e6) for name, tensor in real.inputs.items()})
    assert past.any()
    for clean, dirty in zip(vars(Transitions.of(real, SIZES)).values(), vars(Transitions.of(poisoned, SIZES)).values()):
        assert torch.equal(clean, dirty)


def test_it_predicts_unseen_rollouts(fitted: LatentWorldModel) -> None:
    real = record_rollouts(STARTS[300:], seed=1)
    estimate = fitted.predict(real)
    assert auroc(estimate.mean, real.returns()) > 0.9
    assert abs(estimate.mean.mean().item() - real.returns().mean().item()) < 0.1
    assert (estimate.epistemic >= 0).all() and (estimate.stochastic == 0).all()
    data = Transitions.of(real, SIZES)
    predicted, _ = fitted.network.imagine(data.state, data.chunk)
    goes_on = data.continues > 0
    error, change = ((end - data.following)[goes_on].square().mean().sqrt() for end in (predicted, data.state))
    assert error < 0.05 and change > 0.2


def test_members_disagree_more_far_from_the_data(fitted: LatentWorldModel) -> None:
    near = states_of(record_rollouts(STARTS[300:]), SIZES)[:, 0]
    spread = []
    for scale, action in ((1.0, 0.0), (4.0, 3.0)):  # far: states four times as large, actions three times beyond their limits
        chunk = torch.full((3, len(near), CHUNK * 3), action)
        spread.append(fitted.network((near * scale).expand(3, -1, -1), chunk)[0].var(0).mean().item())
    assert spread[1] > 10 * spread[0]


def test_a_privileged_entry_tells_success_where_it_alone_decides() -> None:
    real, unseen = (record_rollouts(STARTS[rows], rule=goal_is_positive) for rows in (slice(0, 300), slice(300, 400)))
    told, blind = build_model(WITH_GOAL, passes=20.0), build_model(SIZES, passes=20.0)
    told.fit(real, seed=0)
    blind.fit(real, seed=0)
    outcome = unseen.returns()
    assert outcome.mean() == pytest.approx(0.5, abs=0.1) and torch.equal(outcome, unseen.rewards[:, 0])
    # judged in the first decision, which every rollout takes: later ones are taken by failures alone
    assert auroc(told.member_hazards(unseen).mean(0)[:, 0], outcome) > 0.99
    assert auroc(blind.member_hazards(unseen).mean(0)[:, 0], outcome) == pytest.approx(0.5, abs=0.15)


def test_rollouts_that_lack_a_privileged_entry_are_refused_by_name() -> None:
    bare = without(record_rollouts(STARTS[:10]), "goal")
    sentence = (
        r"expected rollouts that record 'goal' for the world model, found \['features', 'language', 'proprio'\]; "
        "collect them again, or change world_model.latent.privileged"
    )
    model = build_model(WITH_GOAL)
    with pytest.raises(ValueError, match=sentence):
        model.fit(bare, seed=0)
    with pytest.raises(ValueError, match=sentence):
        model.predict(bare)
    assert model.version == 0
    build_model(SIZES, passes=1.0).fit(bare, seed=0)


def test_fit_steps_grow_with_the_data_never_fewer_than_the_minimum_and_the_version_counts_fits() -> None:
    model = build_model(passes=3.0, min_steps=10)
    small = model.fit(record_rollouts(STARTS[:20]), seed=0)
    large = model.fit(record_rollouts(STARTS[:200]), seed=1)
    assert model.version == 2
    assert round(3.0 * small["transitions"] / 64) < 10 == small["fit_steps"]
    assert large["fit_steps"] == round(3.0 * large["transitions"] / 64) > 10


def test_a_fit_depends_on_data_and_seed_and_on_no_fit_before_it() -> None:
    real = record_rollouts(STARTS[:40])
    used, fresh, other = (build_model(passes=2.0) for _ in range(3))
    used.fit(record_rollouts(STARTS[100:200], seed=3), seed=7)
    assert used.fit(real, seed=1) == fresh.fit(real, seed=1)
    assert weights_equal(used, fresh) and (used.version, fresh.version) == (2, 1)
    other.fit(real, seed=2)
    assert not weights_equal(other, fresh)


def test_fitting_draws_from_no_global_generator() -> None:
    real = record_rollouts(STARTS[:20])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = build_model(passes=1.0)
        first.fit(real, seed=1)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        second = build_model(passes=1.0)
        second.fit(real, seed=1)
    assert weights_equal(first, second)


def test_a_saved_model_predicts_and_goes_on_as_the_saved_one() -> None:
    real = record_rollouts(STARTS[:40])
    whole, second = build_model(passes=2.0), build_model(passes=2.0)
    whole.fit(real, seed=0)
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert weights_equal(whole, second) and second.version == 1
    assert torch.equal(whole.predict(real).mean, second.predict(real).mean)
    assert whole.fit(real, seed=1) == second.fit(real, seed=1)
    assert weights_equal(whole, second) and second.version == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"members": 1}, "at least 2 ensemble members .*, got 1"),
        ({"min_steps": 0}, "expected min_steps >= 1, got 0"),
        ({"width": 0}, "expected width >= 1, got 0"),
        ({"learning_rate": 0.0}, "expected learning_rate above 0, got 0.0"),
        ({"input_noise": -0.1}, "expected input_noise >= 0, got -0.1"),
        ({"passes": 0.0}, "expected passes above 0, got 0.0"),
        ({"low_ridge": 0.0}, "expected low_ridge above 0, got 0.0"),
        ({"feature_ridge": -1.0}, "expected feature_ridge above 0, got -1.0"),
        ({"own_share": 0.0}, r"expected own_share in \(0, 1\], got 0.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LatentConfig(**changes)
