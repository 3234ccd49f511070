"""Intervals and tests behind every number we print.

Shape legend: N items (episodes, pairs), S training seeds, E evaluation starts, R bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A point estimate with its lower and upper bound."""

    estimate: float
    low: float
    high: float


class PairedTest(NamedTuple):
    """Exact McNemar test: `only_first` and `only_second` count the starts that exactly one of the two solved."""

    p_value: float
    only_first: int
    only_second: int
    n: int


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a success rate (Wilson 1927)."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got {successes} of {n}")
    bounds = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(successes / n, float(bounds.low), float(bounds.high))


def mcnemar_exact(first: ArrayLike, second: ArrayLike) -> PairedTest:
    """Two-sided exact McNemar test of paired successes (N,), (N,): binomial on the discordant pairs. No discordant pair: p
    = 1."""
    a, b = _paired(first, second)
    only_first, only_second = int(((a > 0.5) & (b <= 0.5)).sum()), int(((a <= 0.5) & (b > 0.5)).sum())
    discordant = only_first + only_second
    p_value = float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return PairedTest(p_value, only_first, only_second, len(a))


def paired_bootstrap(
    first: ArrayLike, second: ArrayLike, *, seed: int, resamples: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Percentile interval of mean(first - second) over paired starts (N,), resampling the starts."""
    a, b = _paired(first, second)
    difference = a - b
    rows = np.random.default_rng(seed).integers(0, len(difference), (resamples, len(difference)))
    return _percentile(float(difference.mean()), difference[rows].mean(axis=1), confidence)


def difference_of_means(first: Array, second: Array) -> Array:
    """Statistic for `hierarchical_bootstrap`: (..., S, E) twice -> (...)."""
    return first.mean(axis=(-2, -1)) - second.mean(axis=(-2, -1))


def ratio_of_means(first: Array, second: Array) -> Array:
    """Statistic for `hierarchical_bootstrap`: the first mean over the second; nan where the second is 0."""
    denominator = second.mean(axis=(-2, -1))
    return first.mean(axis=(-2, -1)) / np.where(denominator == 0, np.nan, denominator)


def hierarchical_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    *,
    seed: int,
    statistic: Callable[[Array, Array], Array] = difference_of_means,
    resamples: int = 5_000,
    confidence: float = 0.95,
) -> Interval:
    """Interval of a comparison over training seeds and evaluation starts, (S, E) each.

    Rows are training seeds, columns evaluation starts. Seeds are resampled first, then the starts inside each drawn seed;
    the two arms keep one draw, so they stay paired by seed and by start.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"expected two tables (seeds, starts) of one shape, got {a.shape} and {b.shape}")
    generator = np.random.default_rng(seed)
    num_seeds, num_starts = a.shape
    values = np.empty(resamples)
    for index in range(resamples):
        rows = generator.integers(0, num_seeds, num_seeds)[:, None]
        columns = generator.integers(0, num_starts, (num_seeds, num_starts))
        values[index] = statistic(a[rows, columns], b[rows, columns])
    return _percentile(float(statistic(a, b)), values[np.isfinite(values)], confidence)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve, ties counted half (Mann-Whitney); nan when only one class is there."""
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(labels) > 0.5
    if y.all() or not y.any():
        return math.nan
    return float(stats.mannwhitneyu(s[y], s[~y]).statistic / (y.sum() * (~y).sum()))


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared difference of probability and 0/1 outcome."""
    p, y = _paired(probabilities, labels)
    return float(((p - y) ** 2).mean())


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 10) -> float:
    """Mean |confidence - frequency| over equal-width bins, weighted by their counts (Guo et al. 2017, eq. 3)."""
    p, y = _paired(probabilities, labels)
    index = np.minimum((p * bins).astype(int), bins - 1)
    gaps = [abs(p[index == b].sum() - y[index == b].sum()) for b in range(bins)]
    return float(sum(gaps) / len(p))


def fisher_interval(correlation: float, degrees: float, z: float = 1.645) -> tuple[float, float]:
    """tanh(atanh(rho) -+ z / sqrt(degrees - 3)) (method 3.8); (-1, 1) while there are at most 3 degrees of freedom."""
    if degrees <= 3:
        return -1.0, 1.0
    centre = math.atanh(min(max(correlation, -1 + 1e-9), 1 - 1e-9))
    half = z / math.sqrt(degrees - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def group_centred(values: ArrayLike, groups: ArrayLike) -> Array:
    """Values (N,) minus the mean of their group (N,)."""
    v = np.asarray(values, dtype=np.float64)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    means = np.bincount(index, weights=v) / np.bincount(index)
    return v - means[index]


def within_group_correlation(first: ArrayLike, second: ArrayLike, groups: ArrayLike) -> Interval:
    """Pearson correlation of the group-centred values, with its Fisher interval on sum(G - 1) degrees of freedom; nan
    without spread."""
    a, b = group_centred(first, groups), group_centred(second, groups)
    power = float((a * a).sum() * (b * b).sum())
    if power <= 1e-24:
        return Interval(math.nan, -1.0, 1.0)
    correlation = float((a * b).sum() / math.sqrt(power))
    degrees = len(a) - len(np.unique(np.asarray(groups)))
    return Interval(correlation, *fisher_interval(correlation, degrees))


def _paired(first: ArrayLike, second: ArrayLike) -> tuple[Array, Array]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise ValueError(f"expected two equally long, non-empty lists, got shapes {a.shape} and {b.shape}")
    return a, b


def _percentile(estimate: float, resampled: Array, confidence: float) -> Interval:
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return Interval(estimate, float(low), float(high))
