"""The formulas of the correction, one by one, against known answers (method.md's identities E1-E7 and closed forms)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.wmrl.toys import generator, normal
from wmrl.correction.advantages import TaskScale, advantages, lambda_advantages, leave_one_out, uninformative_groups
from wmrl.correction.anchors import inclusion_probabilities, systematic_sample
from wmrl.correction.combine import Combination, fusion, imagined_coefficients, match, merge, real_coefficients
from wmrl.correction.control import Moments
from wmrl.correction.variance import VarianceCalibration, baseline_weights, effective_sample_size, spread_variance
from wmrl.toy import rollouts_of
from wmrl.types import Rollouts

# Advantages


def test_leave_one_out_of_one_success_in_four() -> None:
    got = advantages(rollouts_of(torch.tensor([[1.0, 0.0, 0.0, 0.0]])))[:, 0]
    torch.testing.assert_close(got, torch.tensor([1, -1 / 3, -1 / 3, -1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("reward", [0.1, 0.35, 0.7, 1 / 3, 0.0, 1.0])
def test_equal_rewards_have_exactly_no_advantage(reward: float) -> None:
    rollouts = rollouts_of(torch.tensor([[reward] * 8, [1.0] * 8, [0.0] * 8]))
    assert torch.equal(advantages(rollouts), torch.zeros(24, 1, dtype=torch.float64))
    assert uninformative_groups(rollouts) == (3, 3)


def test_the_leave_one_out_form_is_the_covariance_form() -> None:
    """E1: (1/G) sum A_i s_i = (1/(G-1)) sum r_i (s_i - sbar) = G/(G-1) times the mean-centred form."""
    returns, scores = normal(1, 6), normal(6, 3, seed=1)
    # rollouts hold float32; the identity is about what they hold
    rollouts = rollouts_of(returns)
    r = rollouts.returns().double()
    got = (advantages(rollouts) * scores).mean(dim=0)
    covariance = (r[:, None] * (scores - scores.mean(0))).sum(0) / 5
    centred_form = ((r - r.mean())[:, None] * scores).mean(0) * 6 / 5
    torch.testing.assert_close(got, covariance, atol=1e-12, rtol=0)
    torch.testing.assert_close(got, centred_form, atol=1e-12, rtol=0)


def test_the_two_arm_gradient_is_exact_when_all_pairs_are_enumerated() -> None:
    """E6: the mean over all pairs of g = (r1 - r2)(s1 - s2)/2 is p o (r - p.r)."""
    p, r = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([0.25, 0.75], dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64)
    for first in range(2):
        for second in range(2):
            pair = torch.tensor([first, second])
            scores = torch.eye(2, dtype=torch.float64)[pair] - p
            total += p[first] * p[second] * (advantages(rollouts_of(r[pair][None])) * scores).mean(0)
    torch.testing.assert_close(total, p * (r - (p * r).sum()), atol=1e-7, rtol=0)


def soft(hazards: Tensor) -> Rollouts:
    """Soft rollouts of one group from the success probability of each decision (G, T)."""
    survival = torch.cat([torch.ones(len(hazards), 1), (1 - hazards).cumprod(dim=1)[:, :-1]], dim=1)
    base = rollouts_of(torch.zeros(1, len(hazards)), imagined=True)
    zeros = torch.zeros(*hazards.shape, 1)
    return Rollouts(
        starts=base.starts,
        member=base.member,
        actions=zeros,
        inputs={},
        final={},
        log_probs=zeros,
        token_mask=zeros.bool(),
        rewards=survival * hazards,
        mask=survival,
        status=base.status,
        seconds=base.seconds,
        imagined=True,
    )


def test_soft_endings_give_the_expected_advantage_of_hard_ones() -> None:
    """Rao-Blackwell: sampling hard endings of the first member and averaging its classic advantages gives the soft ones."""
    hazards = torch.tensor([[0.2, 0.5, 0.1], [0.3, 0.0, 0.4]])
    got = advantages(soft(hazards))[0]
    other = 1 - 0.7 * 1.0 * 0.6
    expected = torch.zeros(3, dtype=torch.float64)
    h = hazards[0].double()
    for ending, chance in enumerate([h[0], (1 - h[0]) * h[1], (1 - h[0]) * (1 - h[1]) * h[2], (1 - h).prod()]):
        success = float(ending < 3)
        for t in range(min(ending, 2) + 1):
            expected[t] += chance * (success - other)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_a_correction_enters_as_a_terminal_reward() -> None:
    rollouts = rollouts_of(torch.tensor([[0.5, 0.25, 0.0]]), imagined=True)
    shift = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(
        advantages(rollouts, correction=shift), advantages(rollouts_of(torch.tensor([[0.0, 0.25, 0.5]])))
    )


def test_rollouts_without_an_outcome_have_no_advantage_and_no_say() -> None:
    got = advantages(rollouts_of(torch.tensor([[1.0, 0.0, math.nan, 0.0], [1.0, math.nan, math.nan, math.nan]])))[:, 0]
    torch.testing.assert_close(got, torch.tensor([1, -0.5, 0, -0.5, 0, 0, 0, 0], dtype=torch.float64))


def test_a_weighted_baseline_is_the_weighted_mean_of_the_others() -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    got = leave_one_out(values, torch.zeros(3, dtype=torch.long), weights)
    torch.testing.assert_close(got, torch.tensor([28 / 8, 25 / 7, 5 / 3], dtype=torch.float64))


def test_lambda_one_telescopes_and_a_time_limit_is_bootstrapped() -> None:
    """D02: observation = step, V(s) = s, reward 0: cut off by time, the target is V(3) = 3; truly ended it is 0."""
    values, mask, nothing = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.ones(1, 3), torch.zeros(1, 3)
    cut = lambda_advantages(nothing, values, mask, decay=1.0, bootstrap=torch.ones(1))
    ended = lambda_advantages(nothing, values, mask, decay=1.0, bootstrap=torch.zeros(1))
    assert cut.tolist() == [[3.0, 2.0, 1.0]]
    assert ended.tolist() == [[0.0, -1.0, -2.0]]
    one_step = lambda_advantages(nothing, values, mask, decay=0.0, bootstrap=torch.zeros(1))
    assert one_step.tolist() == [[1.0, 1.0, -2.0]]


def test_the_task_scale_is_a_floored_root_of_past_within_group_variance() -> None:
    scale, real = TaskScale(memory=0.0), rollouts_of(torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    assert scale(real.starts)[0] == 0.5
    scale.update(real)
    assert scale(real.starts)[0] == pytest.approx(math.sqrt(1 / 3))
    scale.update(rollouts_of(torch.ones(1, 4)))
    assert scale(real.starts)[0] == 0.25


# Variance


def test_spread_is_what_noise_does_not_explain_and_weights_are_capped() -> None:
    groups, valid = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    values = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    variance = torch.tensor([0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(spread_variance(values, variance, groups, valid), torch.full((4,), 1 / 3 - 0.1).double())
    uneven = torch.tensor([1e-4, 1e-4, 1e-4, 10.0], dtype=torch.float64)
    weights = baseline_weights(torch.zeros(4, dtype=torch.float64), uneven, groups, valid, max_ratio=20.0)
    assert float(weights.max() / weights.min()) == pytest.approx(20.0)


def test_effective_sample_size_of_the_known_example() -> None:
    """E7: weights (1, 1, 1, 0.1): ESS / m = 0.79817."""
    assert effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 0.1])) / 4 == pytest.approx(0.79817, abs=1e-5)


def test_the_luck_of_binary_outcomes_is_not_the_predictions_error() -> None:
    """A perfect predictor of a coin's probability has no excess: the ratio goes to 0, not to p(1-p)/sigma^2."""
    chance = torch.full((4000,), 0.3, dtype=torch.float64)
    outcome = torch.bernoulli(chance, generator=generator())
    calibration = VarianceCalibration()
    calibration.update(outcome, chance, outcome - chance, torch.full((4000,), 0.01, dtype=torch.float64))
    assert calibration.ratio < 1.0 and calibration.factor >= 0.25
    real_error = VarianceCalibration()
    real_error.update(normal(4000), chance, 0.2 * normal(4000), torch.full((4000,), 0.01, dtype=torch.float64))
    assert real_error.ratio == pytest.approx(4.0, rel=0.1)


# Combination


def gradients(kappa: float, l: float, *, same: bool) -> tuple[Tensor, Tensor]:  # noqa: E741
    """The coefficients' gradient and formula (2), for 5 groups of 4 with anchors 0 and 3, on random advantages and scores."""
    a_real, a_imagined = normal(8, 1), normal(20, 1, seed=1)
    s_imagined = normal(20, 3, seed=2)
    anchor_rows = torch.cat([torch.arange(4), torch.arange(12, 16)])
    s_real = s_imagined[anchor_rows] if same else normal(8, 3, seed=3)
    combination = Combination(kappa, l)
    weights = torch.full((8,), 1 / (2 * 4), dtype=torch.float64)
    twins = torch.zeros(20, dtype=torch.float64).index_fill(0, anchor_rows, 1 / 8)
    c_real = real_coefficients(a_real, weights, combination)
    c_imagined = imagined_coefficients(a_imagined, torch.full((20,), 1 / 20, dtype=torch.float64), twins, combination)
    if same:
        c_real, c_imagined = merge(c_real, c_imagined, anchor_rows)
        assert not bool(c_real.any())
    got = (c_real * s_real).sum(0) + (c_imagined * s_imagined).sum(0)
    real = (a_real * s_real).sum(0) / 8
    anchored = (a_imagined * s_imagined)[anchor_rows].sum(0) / 8
    everything = (a_imagined * s_imagined).mean(0)
    return got, (1 - kappa) * (real - l * anchored) + (kappa + (1 - kappa) * l) * everything


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("kappa", "l"), [(0.0, 0.0), (0.0, 0.6), (0.3, 0.5), (1.0, 0.7), (0.7, 1.0)])
def test_coefficients_reproduce_the_two_parameter_family(kappa: float, l: float, same: bool) -> None:  # noqa: E741
    """E2, for replays (4) and for twins (S1 of 3.9)."""
    got, expected = gradients(kappa, l, same=same)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("w", [0.5, 1.0, 3.0])
def test_inverse_variance_fusion_is_a_member_of_the_family(w: float) -> None:
    """E3: (w n gbar_A^R + N gbar_U^F) / (n w + N), with n = 2 and N = 3 groups."""
    combination = fusion(2, 5, w)
    a_real, a_imagined, scores = normal(8, 1), normal(20, 1, seed=1), normal(20, 3, seed=2)
    got, _ = gradients(combination.kappa, combination.l, same=True)
    anchor_rows = torch.cat([torch.arange(4), torch.arange(12, 16)])
    rest = torch.cat([torch.arange(4, 12), torch.arange(16, 20)])
    real, free = (a_real * scores[anchor_rows]).mean(0), (a_imagined * scores)[rest].mean(0)
    torch.testing.assert_close(got, (w * 2 * real + 3 * free) / (2 * w + 3), atol=1e-12, rtol=0)


def test_match_finds_the_same_member_of_the_same_start() -> None:
    imagined = rollouts_of(torch.zeros(3, 2), imagined=True)
    real = rollouts_of(torch.zeros(4, 2))[[5, 0, 7]]
    assert match(imagined, real).tolist() == [5, 0, -1]


def test_control_is_the_shrunken_regression_and_zero_for_weak_or_negative_agreement() -> None:
    moments = Moments(memory=1.0)
    predicted = normal(200, 1)
    moments.update(0.6 * predicted, predicted, torch.ones(200, 1, dtype=torch.float64))
    assert moments.control(correlation=0.8, degrees=102) == pytest.approx(0.6 * (1 - 0.36 / (0.64 * 100)))
    assert moments.control(correlation=0.1, degrees=100) == 0.0
    assert moments.control(correlation=-0.9, degrees=100) == 0.0
    assert Moments(1.0).control(correlation=0.9, degrees=100) == 0.0
    assert moments.variance_ratio(20.0) == pytest.approx(1 / 0.36)


# Anchors


def test_inclusion_probabilities_follow_neyman_with_a_floor() -> None:
    pi = inclusion_probabilities(np.array([1.0] * 5 + [0.1] * 5), 2, 0.2)
    assert pi.sum() == pytest.approx(2.0)
    neyman = np.array([1.0] * 5 + [0.1] * 5) * 2 / 5.5
    np.testing.assert_allclose(pi, 0.8 * neyman + 0.2 * 0.2)
    capped = inclusion_probabilities(np.array([100.0, 1.0, 1.0, 1.0]), 2, 0.2)
    np.testing.assert_allclose(capped, [0.9] + [0.8 / 3 + 0.1] * 3)
    np.testing.assert_allclose(inclusion_probabilities(np.zeros(4), 1, 0.2), 0.25)
    np.testing.assert_allclose(inclusion_probabilities(np.ones(3), 3, 0.2), 1.0)


def test_the_mixed_allocation_has_the_known_variance() -> None:
    """T12: u = (1, 0.1) in equal parts, 10 %: mean(u^2 (1/pi - 1)) is 4.545 evenly, 2.52 by Neyman, 2.66 with the guard."""
    u = np.array([1.0, 0.1] * 500)
    spent = {tau: float((u**2 * (1 / inclusion_probabilities(u, 100, tau) - 1)).mean()) for tau in (0.0, 0.2, 1.0)}
    assert spent == pytest.approx({0.0: 2.52, 0.2: 2.66, 1.0: 4.545}, abs=0.01)


def test_a_systematic_sample_has_a_fixed_size_spreads_over_strata_and_keeps_its_probabilities() -> None:
    pi = inclusion_probabilities(np.array([3.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]), 4, 0.2)
    strata = ["red"] * 4 + ["green"] * 4
    counts = np.zeros(8)
    random = np.random.default_rng(0)
    for _ in range(4000):
        chosen = systematic_sample(pi, strata, random)
        assert len(set(chosen.tolist())) == 4
        counts[chosen] += 1
    np.testing.assert_allclose(counts / 4000, pi, atol=0.03)
    even = systematic_sample(np.full(8, 0.5), strata, random)
    assert (even < 4).sum() == 2
