"""Per-task offsets of the model, d_q = E[rhat - R | q]: followed through time, shrunken towards each other.

Offsets cancel in every group-relative gradient (a constant of the group leaves the leave-one-out advantages alone), so nothing
here touches the policy; they serve the log, thresholds, and groups that mix real and imagined members.

Shape legend: Q tasks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNKNOWN_BETWEEN = 0.09
"""Variance between tasks while fewer than two are known: offsets of about 0.3 on a reward range of 1."""

NOISE_MEMORY = 0.99
"""Discount of the noise estimate per degree of freedom."""

PRIOR_DEGREES = 4.0
"""Degrees of freedom that the initial noise counts for."""

LEAST_NOISE = 1e-4
"""Floor of the noise variance: a hundredth of the reward range, squared."""


class Population(NamedTuple):
    """Tasks as draws from N(mean, between); `mean_variance` is what the mean itself is uncertain by."""

    mean: float
    mean_variance: float
    between: float


def best_forgetting(drift: float, noise: float) -> float:
    """The factor lam = 1 - K of m <- lam m + (1 - lam) y that follows a random walk (step SD `drift`, observation SD `noise`)
    best.

    K = P / (P + s^2) with P = (q^2 + sqrt(q^4 + 4 q^2 s^2)) / 2, the steady Kalman filter of the local-level model (Muth 1960,
    Harvey 1989). The error is then K s^2, about q s for q << s.
    """
    power = drift * drift
    predicted = 0.5 * (power + math.sqrt(power * power + 4 * power * noise * noise))
    return 1 - predicted / (predicted + noise * noise)


def tracking_error(forgetting: float, drift: float, noise: float) -> float:
    """Steady mean squared error of that average: (lam^2 q^2 + (1 - lam)^2 s^2) / (1 - lam^2).

    Derived from e <- lam (e + q w) - (1 - lam) s u with independent standard normal w and u.
    """
    kept, taken = forgetting * drift, (1 - forgetting) * noise
    return (kept * kept + taken * taken) / (1 - forgetting * forgetting)


def between_task_variance(means: Array, variances: Array) -> float:
    """tau^2 = max(0, (Q - (k - 1)) / (W1 - W2 / W1)) from means (Q,) with known error variances (Q,); 0 for one task.

    Q = sum w (m - mbar_w)^2 with w = 1 / v, W1 = sum w, W2 = sum w^2 (DerSimonian & Laird 1986).
    """
    weights = 1.0 / variances
    total = weights.sum()
    spread = total - (weights**2).sum() / total
    if len(means) < 2 or spread <= 0:
        return 0.0
    centre = (weights * means).sum() / total
    excess = (weights * (means - centre) ** 2).sum() - (len(means) - 1)
    return max(0.0, float(excess / spread))


def population(means: Array, variances: Array) -> Population:
    """What the tasks seen so far say of any task (random-effects mean, weights 1 / (v + tau^2)); a wide prior around 0 before
    the first."""
    if not len(means):
        return Population(0.0, 0.0, UNKNOWN_BETWEEN)
    between = between_task_variance(means, variances) if len(means) > 1 else UNKNOWN_BETWEEN
    weights = 1.0 / (variances + between)
    return Population(float((weights * means).sum() / weights.sum()), float(1.0 / weights.sum()), between)


def kalman_step(mean: float, variance: float, observed: float, noise: float) -> tuple[float, float]:
    """Posterior (mean, variance) of a level after an observation with error variance `noise`: K = P / (P + noise)."""
    gain = variance / (variance + noise)
    return mean + gain * (observed - mean), (1 - gain) * variance


class Offsets:
    """Local-level Kalman filter per task, shrunken between tasks by empirical Bayes (Morris 1983).

    drift: standard deviation q of an offset's change per step. 0.02 makes 0.2 in a hundred steps, which is the size of gap that
    the alarms of `Trust` look for; at the initial noise the filter then averages over about 2 / K = 26 steps.
    noise: standard deviation s_d of one group's mean gap before any estimate. Eight outcomes of 0 or 1 bring at most 0.18
    (variance 0.25 / 8), the starts of a task differ by about as much again. It is then estimated online, pooled over tasks,
    from repeated gaps within a step and from innovations: E[(gap - m)^2] = s_d^2 (p + 1 / k) for the mean of k gaps. Variances
    are kept in units of it, p = P / s_d^2, so that a better estimate corrects those of every task, old ones too.
    """

    def __init__(self, drift: float = 0.02, noise: float = 0.25) -> None:
        self.drift = drift
        self._pairs = 0
        self._noise_sums = [PRIOR_DEGREES * noise * noise, PRIOR_DEGREES]
        self._levels: dict[str, tuple[float, float]] = {}

    @property
    def noise_variance(self) -> float:
        """s_d^2 of one group's mean gap."""
        return max(self._noise_sums[0] / self._noise_sums[1], LEAST_NOISE)

    def update(self, keys: list[str], gaps: list[float]) -> None:
        """Once per step: one mean gap, predicted minus real, per anchor group, with the group's task."""
        by_task: dict[str, list[float]] = {}
        for key, gap in zip(keys, gaps, strict=True):
            if math.isfinite(gap):
                by_task.setdefault(key, []).append(gap)
        growth = self.drift**2 / self.noise_variance
        self._levels = {key: (mean, power + growth) for key, (mean, power) in self._levels.items()}
        for key, values in by_task.items():
            count, observed = len(values), math.fsum(values) / len(values)
            squares, degrees = math.fsum((value - observed) ** 2 for value in values), count - 1.0
            if key in self._levels:
                mean, power = self._levels[key]
                squares, degrees = squares + (observed - mean) ** 2 / (power + 1 / count), degrees + 1.0
                self._levels[key] = kalman_step(mean, power, observed, 1 / count)
            else:
                self._levels[key] = observed, 1 / count
            keep = NOISE_MEMORY**degrees
            self._noise_sums = [keep * self._noise_sums[0] + squares, keep * self._noise_sums[1] + degrees]
            self._pairs += count

    def task(self, key: str) -> float:
        """Shrunken offset of one task; that of an average task when it was never seen, 0 when none was."""
        return self.posterior(key)[0]

    def posterior(self, key: str) -> tuple[float, float]:
        """(mean, variance) of a task's offset: b_0 + B (m - b_0) with B = tau^2 / (tau^2 + v), and tau^2 (1 - B) + (1 - B)^2
        Var b_0 (Morris 1983, normal prior and likelihood). B is 0 for a task without pairs."""
        centre = population(*self._table())
        mean, power = self._levels.get(key, (centre.mean, math.inf))
        variance = self.noise_variance * power
        believed = centre.between / (centre.between + variance)
        uncertainty = centre.between * (1 - believed) + (1 - believed) ** 2 * centre.mean_variance
        return centre.mean + believed * (mean - centre.mean), uncertainty

    def pooled(self) -> tuple[float, float, float]:
        """(mean, low, high) of the offset averaged over the tasks seen, 95 %; nan before the first pair, infinite bounds before
        the second."""
        if not self._pairs:
            return math.nan, math.nan, math.nan
        means, variances = self._table()
        mean = float(means.mean())
        half = 1.96 * math.sqrt(variances.sum()) / len(means) if self._pairs > 1 else math.inf
        return mean, mean - half, mean + half

    def _table(self) -> tuple[Array, Array]:
        """Filtered means (Q,) and variances (Q,)."""
        table = np.array(list(self._levels.values()), dtype=np.float64).reshape(-1, 2)
        return table[:, 0], self.noise_variance * table[:, 1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": {key: list(level) for key, level in self._levels.items()},
            "noise_sums": list(self._noise_sums),
            "pairs": self._pairs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._levels = {key: (mean, power) for key, (mean, power) in state["levels"].items()}
        self._noise_sums, self._pairs = list(state["noise_sums"]), state["pairs"]
