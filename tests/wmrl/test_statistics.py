"""Known answers of the intervals and tests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wmrl import statistics as st


def test_wilson_interval_matches_the_textbook() -> None:
    assert st.wilson_interval(44, 100) == pytest.approx((0.44, 0.3467, 0.5377), abs=1e-4)
    assert st.wilson_interval(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    with pytest.raises(ValueError, match="got 3 of 2"):
        st.wilson_interval(3, 2)


def test_mcnemar_counts_discordant_pairs_only() -> None:
    first = [1] * 10 + [1] * 9 + [0] * 1 + [0] * 80
    second = [1] * 10 + [0] * 9 + [1] * 1 + [0] * 80
    result = st.mcnemar_exact(first, second)
    assert (result.only_first, result.only_second, result.n) == (9, 1, 100)
    assert result.p_value == pytest.approx(22 / 1024)
    assert st.mcnemar_exact([1, 0], [1, 0]).p_value == 1.0


def test_paired_bootstrap_is_as_wide_as_the_normal_interval() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(400)
    second = first - 0.1 + 0.2 * generator.standard_normal(400)
    low, high = st.paired_bootstrap(first, second, seed=1)[1:]
    half = 1.96 * np.std(first - second) / 20
    assert high - low == pytest.approx(2 * half, rel=0.1)
    assert low < 0.1 < high


def test_hierarchical_bootstrap_sees_the_spread_between_seeds() -> None:
    """Three seeds with gains 0, 0.1, 0.2 and no spread inside: the interval spans the seeds, not 0."""
    second = np.zeros((3, 200))
    first = second + np.array([0.0, 0.1, 0.2])[:, None]
    interval = st.hierarchical_bootstrap(first, second, seed=0)
    assert interval.estimate == pytest.approx(0.1)
    assert (interval.low, interval.high) == (pytest.approx(0.0, abs=0.01), pytest.approx(0.2, abs=0.01))


def test_hierarchical_bootstrap_of_a_ratio() -> None:
    first, second = np.full((3, 50), 0.6), np.full((3, 50), 0.3)
    interval = st.hierarchical_bootstrap(first, second, seed=0, statistic=st.ratio_of_means, resamples=200)
    assert interval == pytest.approx((2.0, 2.0, 2.0))


def test_auroc_counts_ties_half_and_is_nan_for_one_class() -> None:
    assert st.auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == pytest.approx(0.75)
    assert st.auroc([1, 1], [0, 1]) == 0.5
    assert math.isnan(st.auroc([1, 2], [1, 1]))


def test_brier_and_calibration_error() -> None:
    assert st.brier_score([0.0, 1.0, 0.5], [0, 1, 1]) == pytest.approx(0.25 / 3)
    assert st.expected_calibration_error([0.95] * 10 + [0.05] * 10, [1] * 8 + [0] * 2 + [0] * 10) == pytest.approx(0.1)


def test_fisher_interval_matches_the_formula_and_is_empty_handed_with_three_degrees() -> None:
    low, high = st.fisher_interval(0.5, 63)
    assert low == pytest.approx(math.tanh(math.atanh(0.5) - 1.645 / math.sqrt(60)))
    assert high == pytest.approx(math.tanh(math.atanh(0.5) + 1.645 / math.sqrt(60)))
    assert st.fisher_interval(0.9, 3) == (-1.0, 1.0)


def test_within_group_correlation_sees_through_simpson() -> None:
    """Pooled correlation is high because tasks differ; inside the groups it is negative (method 3.2)."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 8)
    difficulty = 3.0 * generator.standard_normal(20)[groups]
    inner = generator.standard_normal(160)
    first, second = difficulty + inner, difficulty - inner + 0.3 * generator.standard_normal(160)
    assert np.corrcoef(first, second)[0, 1] > 0.7
    result = st.within_group_correlation(first, second, groups)
    assert result.estimate < -0.9 and result.high < -0.8
    assert math.isnan(st.within_group_correlation([1, 1], [1, 2], [0, 0]).estimate)
