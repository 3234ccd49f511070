"""Debiasing keeps its promises: what it learns inside groups, how it forgets, what it refuses, and offsets between tasks.

Known answers are closed forms or exact values; Monte-Carlo means are held to four standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard
from torch import Tensor

from tests.wmrl.toys import normal, states_equal
from wmrl.correction.debias import DebiasingMap, MapConfig, WithinGroupMap, centred
from wmrl.correction.isotonic import IsotonicMap, interpolate, monotone_fit
from wmrl.correction.offsets import Offsets, best_forgetting, between_task_variance, kalman_step, population, tracking_error
from wmrl.state_codec import decode, encode

Array = NDArray[np.float64]
BOTH = pytest.mark.parametrize("kind", [WithinGroupMap, DebiasingMap])
Map = WithinGroupMap | DebiasingMap


def hits(samples: Array, expected: float) -> None:
    """The mean of independent samples is the expected value, |z| < 4."""
    error = float(samples.std(ddof=1)) / math.sqrt(len(samples))
    assert abs(float(samples.mean()) - expected) < 4 * error, (float(samples.mean()), expected, error)


def observe_map(learner: Map, *, slope: float, weight: float, groups: int, noise: float, seed: int = 0) -> None:
    """Pairs R = slope * rhat + weight * phi + noise inside groups of 8, with a large offset per group."""
    size = 8 * groups
    predictions, features = normal(size, seed=seed), normal(size, 1, seed=seed + 1)
    index = torch.arange(groups).repeat_interleave(8)
    offset = 5 * normal(groups, seed=seed + 2)[index]
    returns = slope * predictions + weight * features[:, 0] + noise * normal(size, seed=seed + 3)
    learner.update(predictions + offset, features, returns, index, torch.ones(size, dtype=torch.bool))


def nothing_came(learner: Map) -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    learner.update(empty, torch.zeros(0, 1), empty, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))


def shift_of(learner: Map, predictions: Tensor, features: Tensor) -> Tensor:
    size = len(predictions)
    return learner.shift(predictions, features, torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool))[0]


def state_size(state: Any) -> int:
    """Numbers in a state."""
    if isinstance(state, Tensor):
        return state.numel()
    if isinstance(state, dict):
        return sum(state_size(value) for value in state.values())
    return sum(state_size(value) for value in state) if isinstance(state, list | tuple) else 1


# The linear map


@BOTH
def test_without_pairs_the_map_is_the_identity_with_prior_variance(kind: type[Map]) -> None:
    """slope_sd^2 rhat~^2 + feature_sd^2 (phi~ / sd)^2: 0.25 and 0.09 for centred values of one standard deviation."""
    predictions = torch.tensor([1.0, -1.0], dtype=torch.float64)
    groups, valid = torch.zeros(2, dtype=torch.long), torch.ones(2).bool()
    for features, expected in ((torch.zeros(2, 1), 0.25), (torch.tensor([[7.0], [-3.0]]), 0.34)):
        shift, variance = kind(MapConfig(), 1).shift(predictions, features, groups, valid)
        assert torch.equal(shift, torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(variance, torch.full((2,), expected, dtype=torch.float64), atol=1e-6, rtol=0)


@BOTH
def test_the_map_finds_slope_and_feature_whatever_the_offsets(kind: type[Map]) -> None:
    learner = kind(MapConfig(), 1)
    for step in range(40):
        observe_map(learner, slope=0.4, weight=-0.6, groups=4, noise=0.2, seed=10 * step)
    predictions, features = torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]])
    got = predictions + shift_of(learner, predictions, features)
    torch.testing.assert_close(got, torch.tensor([-0.2, 0.2], dtype=torch.float64), atol=0.03, rtol=0)
    assert learner.helps and learner.noise == pytest.approx(0.04, rel=0.3)


@BOTH
def test_simpson_gives_a_negative_slope(kind: type[Map]) -> None:
    """Offsets between groups make the pooled correlation 0.85 while it is -0.72 inside them; the map must turn the sign."""
    size, within = 8 * 400, -0.72
    index = torch.arange(400).repeat_interleave(8)
    level = math.sqrt((0.85 - within) / (1 - 0.85)) * normal(400, seed=1)[index]
    predictions = normal(size, seed=2)
    returns = within * predictions + math.sqrt(1 - within**2) * normal(size, seed=3)
    pooled = torch.stack([predictions + level, returns + level])
    assert float(torch.corrcoef(pooled)[0, 1]) == pytest.approx(0.85, abs=0.02)
    assert float(torch.corrcoef(torch.stack([predictions, returns]))[0, 1]) == pytest.approx(within, abs=0.02)
    learner = kind(MapConfig(), 0)
    learner.update(pooled[0], torch.zeros(size, 0), pooled[1], index, torch.ones(size, dtype=torch.bool))
    assert learner.slope == pytest.approx(within, abs=0.05)


@BOTH
def test_information_winds_down_to_the_prior_without_data(kind: type[Map]) -> None:
    learner = kind(MapConfig(discounts=(0.5,)), 1) if kind is DebiasingMap else WithinGroupMap(MapConfig(), 1, discount=0.5)
    observe_map(learner, slope=0.0, weight=0.0, groups=50, noise=0.1)
    assert abs(learner.slope) < 0.1
    for _ in range(60):
        nothing_came(learner)
    assert learner.slope == pytest.approx(1.0, abs=1e-6)


@BOTH
def test_a_map_that_would_not_have_helped_is_not_used(kind: type[Map]) -> None:
    """The relation turns around at every step: what the map learned is always wrong, and the gate shuts."""
    learner = kind(MapConfig(), 1)
    for step in range(20):
        observe_map(learner, slope=1.0, weight=1.0 if step % 2 else -1.0, groups=4, noise=0.0, seed=10 * step)
    assert not learner.helps


def test_break_even_lies_where_the_formula_puts_it() -> None:
    """n* = d s_e^2 / (B_w^2 - B_perp^2) = 8 * 0.09 / 0.04 = 18 pairs: learning 8 feature weights from 16 pairs makes
    predictions worse by 8 * 0.09 / 16 - 0.04 = 0.005, from 32 better by 0.0175 (orthogonal features, almost no prior)."""
    features = torch.tensor(hadamard(16)[:, 1:9], dtype=torch.float64)
    config = MapConfig(feature_sd=1e3, initial_noise=0.09)
    random = torch.Generator().manual_seed(0)
    for repeats, expected in ((1, 0.005), (2, -0.0175)):
        table = features.repeat(repeats, 1)
        index = torch.arange(repeats).repeat_interleave(16)
        changes = []
        for _ in range(400):
            bias = torch.randn(8, generator=random, dtype=torch.float64)
            bias *= 0.2 / bias.norm()
            returns = table @ bias + 0.3 * torch.randn(len(table), generator=random, dtype=torch.float64)
            learner = WithinGroupMap(config, 8)
            learner.update(torch.zeros(len(table)), table, returns, index, torch.ones(len(table), dtype=torch.bool))
            learned = shift_of(learner, torch.zeros(16), features)
            changes.append(float(((learned - features @ bias) ** 2).mean()) - 0.04)
        hits(np.array(changes), expected)


# Weights of pairs


def test_one_over_pi_weights_undo_the_choice_of_anchors() -> None:
    """Half of all groups have slope 1, half 0.2; anchors take the first kind 4 times as often. The map of all groups is 0.6."""
    size, kinds = 8 * 500, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.2], dtype=torch.float64)
    index = torch.arange(500).repeat_interleave(8)
    slope = kinds[index % 5]
    predictions, valid = normal(size), torch.ones(size, dtype=torch.bool)
    returns = slope * predictions + 0.1 * normal(size, seed=1)
    weights = torch.where(slope == 1.0, 1 / 0.8, 1 / 0.2)
    found = {}
    for name, given in (("even", None), ("inverse", weights), ("scaled", 1000 * weights)):
        learner = DebiasingMap(MapConfig(), 0)
        learner.update(predictions, torch.zeros(size, 0), returns, index, valid, weights=given)
        found[name] = learner.slope, float(learner.shift(predictions, torch.zeros(size, 0), index, valid)[1].mean())
    assert found["even"][0] == pytest.approx(0.84, abs=0.02)
    assert found["inverse"][0] == pytest.approx(0.6, abs=0.03)
    assert found["scaled"] == pytest.approx(found["inverse"], rel=1e-9)


def test_inverse_variance_weights_give_the_weighted_within_estimator() -> None:
    """With almost no prior the map is weighted least squares with an intercept per group."""
    index, valid = torch.arange(10).repeat_interleave(4), torch.ones(40, dtype=torch.bool)
    predictions, returns, weights = normal(40), normal(40, seed=1), 0.1 + normal(40, seed=2) ** 2
    learner = WithinGroupMap(MapConfig(slope_sd=1e4), 0)
    learner.update(predictions, torch.zeros(40, 0), returns, index, valid, weights=weights)
    design = torch.cat([predictions[:, None], torch.nn.functional.one_hot(index).double()], dim=1)
    root = weights.sqrt()[:, None]
    expected = torch.linalg.lstsq(root * design, root * returns[:, None]).solution[0]
    assert learner.slope == pytest.approx(float(expected), abs=1e-6)


def test_weights_must_be_positive_and_finite() -> None:
    learner = DebiasingMap(MapConfig(), 0)
    groups, valid = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.bool)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected finite weights above 0"):
            learner.update(normal(2), torch.zeros(2, 0), normal(2), groups, valid, weights=torch.tensor([1.0, bad]))


# Several half-lives


def drifting(weights: list[float], *, noise: float = 0.3) -> tuple[DebiasingMap, list[list[float]]]:
    """Feed steps of 2 groups of 8 whose feature has that bias; squared error of (mixture, short, long) before each step."""
    config = MapConfig(discounts=(0.9, 0.997))
    mixture, short, long = DebiasingMap(config, 1), WithinGroupMap(config, 1, 0.9), WithinGroupMap(config, 1, 0.997)
    learners: list[Map] = [mixture, short, long]
    probe = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    errors = []
    for step, weight in enumerate(weights):
        found = [float(shift_of(learner, torch.zeros(2), probe)[0]) for learner in learners]
        errors.append([(value - weight) ** 2 for value in found])
        for learner in learners:
            observe_map(learner, slope=1.0, weight=weight, groups=2, noise=noise, seed=10 * step)
    return mixture, errors


def test_the_mixture_prefers_the_long_memory_while_nothing_moves() -> None:
    mixture, errors = drifting([0.4] * 150)
    assert float(mixture.weights[1]) > 0.8
    late = np.array(errors)[50:].mean(axis=0)
    assert late[0] < 0.6 * late[1] and late[0] < 2.0 * late[2] + 1e-3


def test_after_a_jump_the_mixture_moves_to_the_short_memory_and_tracks_better_than_the_long_one() -> None:
    mixture, errors = drifting([0.5] * 150 + [-0.5] * 40)
    after = np.array(errors)[152:].mean(axis=0)
    assert float(mixture.weights[0]) > 0.9
    assert after[0] < 0.35 * after[2]


def test_the_variance_of_the_mixture_is_within_plus_between() -> None:
    mixture, _ = drifting([0.5] * 60 + [-0.5] * 3, noise=1.0)
    predictions, features = torch.zeros(2), torch.tensor([[1.0], [-1.0]])
    groups, valid = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.bool)
    parts = [member.shift(predictions, features, groups, valid) for member in mixture._members]
    w, means = mixture.weights, torch.stack([mean[0] for mean, _ in parts])
    within, between = sum(w * torch.stack([var[0] for _, var in parts])), sum(w * (means - w @ means) ** 2)
    shift, variance = mixture.shift(predictions, features, groups, valid)
    assert float(shift[0]) == pytest.approx(float(w @ means)) and float(variance[0]) == pytest.approx(float(within + between))
    assert float(between) > 0.005


def test_a_new_model_version_discounts_evidence_instead_of_restarting() -> None:
    """slope = (h + 4) / (E + 4) with the prior's precision 4: half the evidence stays, in the slope and in its variance."""
    learner = WithinGroupMap(MapConfig(), 0)
    predictions, groups, valid = normal(16), torch.zeros(16, dtype=torch.long), torch.ones(16, dtype=torch.bool)
    learner.update(predictions, torch.zeros(16, 0), 0.2 * predictions, groups, valid)
    state = learner.state_dict()
    evidence, target = float(state["evidence"]), float(state["target"])
    assert learner.slope == pytest.approx((target + 4) / (evidence + 4)) and learner.slope < 0.5
    learner.forget(0.5)
    assert learner.slope == pytest.approx((0.5 * target + 4) / (0.5 * evidence + 4))
    mixture = DebiasingMap(MapConfig(isotonic=True), 1)
    for step in range(20):
        observe_map(mixture, slope=0.3, weight=0.0, groups=4, noise=0.2, seed=10 * step)
    before, noise, size = mixture.slope, mixture.noise, mixture.state_dict()["isotonic"]["pairs"][:, 2].sum()
    mixture.forget(0.5)
    assert mixture.slope == pytest.approx(before, abs=0.02) and mixture.noise == noise and mixture.helps
    torch.testing.assert_close(mixture.state_dict()["isotonic"]["pairs"][:, 2].sum(), 0.5 * size)


# The isotonic option


def binned_fit(x: Array, y: Array) -> Callable[[Array], Array]:
    """Ten equal bins, made monotone, linear between their centres."""
    bins = np.clip((10 * x).astype(int), 0, 9)
    count = np.bincount(bins, minlength=10)
    kept = count > 0
    centre, value = (np.bincount(bins, values, 10)[kept] / count[kept] for values in (x, y))
    knots = monotone_fit(centre, value, count[kept].astype(np.float64))
    return lambda at: interpolate(knots, at)[0]


def test_the_monotone_fit_keeps_improving_where_ten_bins_have_a_floor() -> None:
    """Truth x^4, noise 0.3: the error of pool-adjacent-violators falls about as n^(-2/3), that of bins stops at 0.0006."""
    random = np.random.default_rng(0)
    grid = (np.arange(2000) + 0.5) / 2000
    expected = {50: 0.0128, 200: 0.0055, 800: 0.0020, 3200: 0.0007, 12800: 0.0002}
    repeats = {50: 200, 200: 150, 800: 60, 3200: 20, 12800: 6}
    errors, binned = {}, {}
    for n, times in repeats.items():
        own, bins = [], []
        for _ in range(times):
            x = random.random(n)
            y = x**4 + 0.3 * random.standard_normal(n)
            own.append(((interpolate(monotone_fit(x, y, np.ones(n)), grid)[0] - grid**4) ** 2).mean())
            bins.append(((binned_fit(x, y)(grid) - grid**4) ** 2).mean())
        errors[n], binned[n] = float(np.mean(own)), float(np.mean(bins))
    for n, value in expected.items():
        assert errors[n] == pytest.approx(value, rel=0.15, abs=0.0001), n
    assert binned[50] < errors[50] and binned[12800] > 2 * errors[12800]
    assert 0.0004 < binned[12800] < 0.0008 and binned[3200] < 1.4 * binned[12800]
    slope = math.log(errors[12800] / errors[200]) / math.log(12800 / 200)
    assert -0.85 < slope < -0.6


def test_a_block_weighs_what_it_pooled() -> None:
    """Values 3, 1 are out of order and become 2, 2 with weight 2 + 1; the rest stands alone."""
    x, y, weights = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 2.5, 1.0, 4.0]), np.array([1.0, 2.0, 1.0, 4.0])
    knots = monotone_fit(x, y, weights)
    np.testing.assert_allclose(knots[:, 0], x)
    np.testing.assert_allclose(knots[:, 1], [0.0, 2.0, 2.0, 4.0])
    np.testing.assert_allclose(1 / knots[:, 2], [1.0, 3.0, 3.0, 4.0])


def observe_curve(learner: DebiasingMap, curve: Callable[[Tensor], Tensor], *, steps: int, seed: int = 0) -> None:
    """Pairs R = curve(rhat - level) + level' + noise in 2 groups of 16 per step, levels of their own per group."""
    index = torch.arange(2).repeat_interleave(16)
    for step in range(steps):
        inside, noise = normal(32, seed=seed + 5 * step), 0.2 * normal(32, seed=seed + 5 * step + 1)
        level, other = (5 * normal(2, seed=seed + 5 * step + k)[index] for k in (2, 3))
        valid = torch.ones(32, dtype=torch.bool)
        learner.update(inside + level, torch.zeros(32, 0), curve(inside) + other + noise, index, valid)


def threshold(inside: Tensor) -> Tensor:
    return (inside > 0.7).double()


def test_the_isotonic_map_is_used_from_200_pairs_on_where_it_predicts_better() -> None:
    learner, linear = DebiasingMap(MapConfig(isotonic=True), 0), DebiasingMap(MapConfig(), 0)
    observe_curve(learner, threshold, steps=6)
    assert not learner.isotonic  # 6 steps of 30 degrees of freedom
    observe_curve(learner, threshold, steps=24, seed=100)
    observe_curve(linear, threshold, steps=30, seed=100)
    assert learner.isotonic and learner.helps
    groups, valid = torch.arange(50).repeat_interleave(16), torch.ones(800, dtype=torch.bool)
    predictions = normal(800, seed=9999)
    truth, z = centred(threshold(predictions), groups, valid), centred(predictions, groups, valid)
    found = {}
    for name, used in (("isotonic", learner), ("linear", linear)):
        shift, variance = used.shift(predictions, torch.zeros(800, 0), groups, valid)
        assert float(centred(shift, groups, valid).sub(shift).abs().max()) < 1e-12 and bool((variance > 0).all())
        found[name] = float(((z + shift - truth) ** 2).mean())
    assert found["isotonic"] < 0.6 * found["linear"]


def test_the_isotonic_map_is_not_used_where_the_truth_is_linear() -> None:
    learner, linear = DebiasingMap(MapConfig(isotonic=True), 0), DebiasingMap(MapConfig(), 0)
    for used in (learner, linear):
        observe_curve(used, lambda inside: 0.5 * inside, steps=40)
    assert not learner.isotonic and learner.state_dict()["isotonic"]["knots"].numel() > 0
    predictions = normal(8)
    shifts = [shift_of(used, predictions, torch.zeros(8, 0)) for used in (learner, linear)]
    torch.testing.assert_close(*shifts, atol=1e-6, rtol=0)


def test_a_new_model_version_puts_the_isotonic_map_on_probation_again() -> None:
    learner = DebiasingMap(MapConfig(isotonic=True), 0)
    observe_curve(learner, threshold, steps=20)
    assert learner.isotonic
    learner.forget(0.2)
    assert not learner.isotonic
    observe_curve(learner, threshold, steps=8, seed=300)
    assert learner.isotonic


# What never reaches the state


@pytest.mark.parametrize("isotonic", [False, True])
def test_values_that_are_not_finite_are_as_if_they_had_not_come(isotonic: bool) -> None:
    config = MapConfig(isotonic=isotonic)
    spoilt, clean = DebiasingMap(config, 2), DebiasingMap(config, 2)
    groups = torch.arange(8).repeat_interleave(8)
    for step in range(12):
        predictions, features, returns = (normal(*shape, seed=3 * step + k) for k, shape in enumerate(((64,), (64, 2), (64,))))
        valid, bad = torch.ones(64, dtype=torch.bool), torch.tensor([3, 20, 41])
        clean.update(predictions, features, returns, groups, valid.index_fill(0, bad, False))
        predictions[3], predictions[20], returns[41] = math.nan, math.inf, -math.inf
        spoilt.update(predictions, features, returns, groups, valid)
    assert states_equal(spoilt.state_dict(), clean.state_dict())
    shift, variance = spoilt.shift(predictions, features, groups, torch.ones(64, dtype=torch.bool))
    assert shift[3] == 0 and shift[20] == 0 and variance[3] == 0
    others = torch.ones(64, dtype=torch.bool).index_fill(0, torch.tensor([3, 20]), False)
    expected = clean.shift(predictions, features, groups, others)[0]
    assert torch.equal(shift, expected) and bool(torch.isfinite(variance).all())


def test_a_feature_that_is_not_finite_is_neutral() -> None:
    learner = DebiasingMap(MapConfig(), 1)
    for step in range(10):
        observe_map(learner, slope=0.5, weight=0.5, groups=4, noise=0.1, seed=10 * step)
    predictions = torch.tensor([1.0, -1.0, 0.0])
    shift = shift_of(learner, predictions, torch.tensor([[math.nan], [1.0], [-1.0]]))
    average = shift_of(learner, predictions, torch.tensor([[0.0], [1.0], [-1.0]]))
    torch.testing.assert_close(shift, average, atol=1e-3, rtol=0)
    groups, valid = torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)
    learner.update(predictions, torch.tensor([[math.inf], [math.nan], [1.0]]), predictions, groups, valid)
    assert math.isfinite(learner.slope) and bool(torch.isfinite(shift_of(learner, predictions, torch.ones(3, 1))).all())


def test_a_wrong_number_of_features_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected 1 features per rollout, got 2"):
        shift_of(DebiasingMap(MapConfig(), 1), normal(4), torch.zeros(4, 2))
    for bad in ((), (0.0,), (0.9, 1.1)):
        with pytest.raises(ValueError, match="expected correction.map.discounts"):
            MapConfig(discounts=bad)


# Resuming, and memory


@pytest.mark.parametrize("isotonic", [False, True])
def test_a_killed_and_resumed_map_continues_bit_for_bit(isotonic: bool) -> None:
    config = MapConfig(isotonic=isotonic)
    whole, resumed = DebiasingMap(config, 0), DebiasingMap(config, 0)
    observe_curve(whole, threshold, steps=15)
    resumed.load_state_dict(decode(*encode(whole.state_dict())))
    assert states_equal(resumed.state_dict(), whole.state_dict()) and resumed.isotonic is isotonic
    for learner in (whole, resumed):
        observe_curve(learner, threshold, steps=5, seed=200)
    assert states_equal(resumed.state_dict(), whole.state_dict())
    predictions = normal(16)
    assert torch.equal(*(shift_of(learner, predictions, torch.zeros(16, 0)) for learner in (whole, resumed)))


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    learner = DebiasingMap(MapConfig(), 1)
    sizes = set()
    for step in range(30):
        observe_map(learner, slope=0.5, weight=0.1, groups=2, noise=0.1, seed=10 * step)
        sizes.add(state_size(learner.state_dict()))
    assert len(sizes) == 1
    isotonic = IsotonicMap(0.99, capacity=300)
    for step in range(60):
        isotonic.add(normal(32, seed=step), normal(32, seed=step), torch.ones(32, dtype=torch.float64))
        assert state_size(isotonic.state_dict()) <= 3 * 300 * 2 + 3
    assert len(isotonic.state_dict()["pairs"]) == 300


# Offsets: tracking


BEST = 0.95123
"""The best forgetting factor at drift 0.05 and noise 1."""


def test_the_tracking_error_of_forgetting_is_the_known_one() -> None:
    assert best_forgetting(0.05, 1.0) == pytest.approx(BEST, abs=5e-6)
    expected = {BEST: 0.04877, 0.8: 0.1156, 0.9: 0.0633, 0.98: 0.0707, 0.995: 0.2506}
    for forgetting, error in expected.items():
        assert tracking_error(forgetting, 0.05, 1.0) == pytest.approx(error, abs=5e-5)
    gain = 1 - best_forgetting(0.05, 1.0)
    assert tracking_error(1 - gain, 0.05, 1.0) == pytest.approx(gain, rel=1e-9)


def test_simulated_averages_and_the_filter_have_that_error() -> None:
    random = np.random.default_rng(0)
    forgetting = np.array([BEST, 0.8, 0.9, 0.98, 0.995])[:, None]
    truth: Array = np.zeros(3000)
    average: Array = np.zeros((5, 3000))
    for _ in range(1000):
        truth += 0.05 * random.standard_normal(3000)
        average = forgetting * average + (1 - forgetting) * (truth + random.standard_normal(3000))
    for row, lam in enumerate(forgetting[:, 0]):
        hits((average[row] - truth) ** 2, tracking_error(float(lam), 0.05, 1.0))
    errors = []
    for _ in range(1500):
        walk = 0.05 * random.standard_normal(150).cumsum()
        mean, variance = 0.0, 1.0
        for value in walk + random.standard_normal(150):
            mean, variance = kalman_step(mean, variance + 0.05**2, float(value), 1.0)
        errors.append((mean - walk[-1]) ** 2)
    assert variance == pytest.approx(0.04877, abs=5e-5)
    hits(np.array(errors), 0.04877)


def test_offsets_follow_a_task_and_learn_the_noise() -> None:
    """A walk of 0.05 per step seen with noise 1, told 0.3: error 0.04877 as if the noise had been known, within 15 %."""
    random = np.random.default_rng(1)
    offsets, truth, errors, noises = Offsets(drift=0.05, noise=0.3), 0.0, [], []
    for _ in range(6000):
        truth += 0.05 * random.standard_normal()
        offsets.update(["task"], [truth + random.standard_normal()])
        errors.append((offsets.task("task") - truth) ** 2)
        noises.append(offsets.noise_variance)
    assert np.mean(noises[500:]) == pytest.approx(1.0, abs=0.08)
    assert np.mean(errors[500:]) == pytest.approx(0.04877, rel=0.15)


def test_repeated_gaps_within_a_step_count_as_one_more_precise_one() -> None:
    """Noise variance s^2 / k on first sight; a walk of 10 per step, told as such, does not pass for noise of 0.5."""
    offsets = Offsets(drift=0.0, noise=1.0)
    offsets.update(["a"] * 4 + ["b"], [1.0, 1.0, 1.0, 1.0, 5.0])
    assert offsets.state_dict()["levels"] == {"a": [1.0, 0.25], "b": [5.0, 1.0]}
    repeated, walk = Offsets(drift=10.0, noise=0.1), 10 * normal(600).cumsum(0)
    estimates = []
    for place, noise in zip(walk.tolist(), (0.5 * normal(600, 4, seed=1)).tolist(), strict=True):
        repeated.update(["a"] * 4, [place + value for value in noise])
        estimates.append(repeated.noise_variance)
    assert np.mean(estimates[100:]) == pytest.approx(0.25, rel=0.1)


# Offsets: shrinkage between tasks


def test_the_variance_between_tasks_is_the_known_one() -> None:
    """Equal variances: the sample variance minus the error variance; never below 0."""
    assert between_task_variance(np.array([0.0, 2.0]), np.array([0.5, 0.5])) == pytest.approx(1.5)
    assert between_task_variance(np.array([0.0, 1.0]), np.array([1.0, 1.0])) == 0.0
    assert between_task_variance(np.array([3.0]), np.array([1.0])) == 0.0
    means, variances = np.array([0.1, 0.5, -0.2]), np.array([0.01, 0.04, 0.02])
    w = 1 / variances
    centre = (w * means).sum() / w.sum()
    expected = ((w * (means - centre) ** 2).sum() - 2) / (w.sum() - (w**2).sum() / w.sum())
    assert between_task_variance(means, variances) == pytest.approx(expected)


def test_shrunken_offsets_have_the_known_risk() -> None:
    """tau^2 = 0.04, v = 0.09: risk tau^2 v / (tau^2 + v) = 0.02769, raw means 0.09, the pooled one 0.04; intervals cover."""
    random = np.random.default_rng(2)
    shrunken, raw, pooled, covered = [], [], [], []
    for _ in range(8):
        truth = 0.3 + 0.2 * random.standard_normal(500)
        seen = truth + 0.3 * random.standard_normal(500)
        offsets = Offsets(noise=0.3)
        offsets.update([str(task) for task in range(500)], seen.tolist())
        average = offsets.pooled()[0]
        for task in range(500):
            mean, variance = offsets.posterior(str(task))
            shrunken.append((mean - truth[task]) ** 2)
            covered.append(float(abs(mean - truth[task]) < 1.96 * math.sqrt(variance)))
        raw += ((seen - truth) ** 2).tolist()
        pooled += ((average - truth) ** 2).tolist()
    for errors, expected in ((shrunken, 0.02769), (raw, 0.09), (pooled, 0.04), (covered, 0.95)):
        hits(np.array(errors), expected)


def test_an_unseen_task_is_an_average_task() -> None:
    offsets = Offsets()
    assert offsets.posterior("a") == (0.0, 0.09)
    offsets.update(["a", "b", "c"], [0.1, 0.5, 0.9])
    centre = population(np.array([0.1, 0.5, 0.9]), np.full(3, 0.0625))
    assert offsets.posterior("new") == pytest.approx((0.5, centre.between + centre.mean_variance))
    assert centre.between == pytest.approx(0.16 - 0.0625)
    believed = centre.between / (centre.between + 0.0625)
    assert offsets.task("a") == pytest.approx(0.5 - 0.4 * believed)


def test_one_task_alone_is_not_shrunken() -> None:
    offsets = Offsets(noise=0.2)
    offsets.update(["a"], [0.7])
    assert offsets.posterior("a") == pytest.approx((0.7, 0.04))
    assert offsets.posterior("new") == pytest.approx((0.7, 0.04 + 2 * 0.09))


def test_offsets_report_the_bias_with_an_interval() -> None:
    """Two tasks with two gaps each: mean of the task means, +- 1.96 sqrt(2 s^2 / 2) / 2. The noise s^2 is the initial 0.01 of 4
    degrees of freedom with the squares 0.02 within both tasks, 2 more."""
    offsets = Offsets(drift=0.0, noise=0.1)
    assert all(math.isnan(value) for value in offsets.pooled())
    offsets.update(["a"], [0.2])
    assert offsets.pooled() == (0.2, -math.inf, math.inf)
    fresh = Offsets(drift=0.0, noise=0.1)
    fresh.update(["a", "a", "b", "b"], [0.2, 0.4, 0.3, 0.5])
    half = 1.96 * math.sqrt((4 * 0.01 + 2 * 0.02) / 6) / 2
    assert fresh.pooled() == pytest.approx((0.35, 0.35 - half, 0.35 + half), rel=0.005)
    before = fresh.pooled()
    fresh.update(["a"], [math.nan])
    assert fresh.pooled() == before


def test_the_reported_interval_covers() -> None:
    """Three tasks, offsets that stand still, noise unknown at first: the average of the tasks lies inside in 95 % of runs."""
    random, inside = np.random.default_rng(3), []
    for _ in range(300):
        truth, offsets = 0.3 * random.standard_normal(3), Offsets(drift=0.0)
        for _ in range(15):
            offsets.update(["a", "b", "c"], (truth + 0.4 * random.standard_normal(3)).tolist())
        _, low, high = offsets.pooled()
        inside.append(float(low < truth.mean() < high))
    assert 0.91 <= np.mean(inside) <= 0.98


def test_killed_and_resumed_offsets_continue_bit_for_bit_and_grow_with_tasks_only() -> None:
    whole, resumed, sizes = Offsets(), Offsets(), set()
    for step in range(40):
        whole.update(["a", "b"], normal(2, seed=step).tolist())
        sizes.add(state_size(whole.state_dict()))
    assert len(sizes) == 1
    resumed.load_state_dict(decode(*encode(whole.state_dict())))
    for offsets in (whole, resumed):
        offsets.update(["a", "c"], [0.1, 0.2])
    assert states_equal(resumed.state_dict(), whole.state_dict()) and resumed.pooled() == whole.pooled()
