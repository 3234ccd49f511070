"""Which groups are also executed for real: a fixed number, chosen after the predictions and before any outcome (method 3.7).

Shape legend: M groups, of which n become anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wmrl.types import Start

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Anchors:
    """The chosen groups' starts with the probability that each had of being chosen."""

    starts: tuple[Start, ...]
    probabilities: tuple[float, ...]


def inclusion_probabilities(scores: Array, count: int, uniform_share: float) -> Array:
    """pi_k proportional to the score, capped at 1, mixed with the uniform rate (M,), summing to `count`.

    Neyman allocation with the guard of method 3.7: pi <- (1 - tau) pi + tau n / M, so that no group ever has probability 0.
    """
    total = len(scores)
    clean = np.where(np.isfinite(scores) & (scores > 0), scores, 0.0)
    if count >= total or clean.max() <= 0:
        return np.full(total, min(1.0, count / total))
    clean = np.maximum(clean, 1e-6 * clean.max())
    capped = np.zeros(total, dtype=bool)
    while True:
        share = (count - capped.sum()) * clean / clean[~capped].sum()
        pi = np.where(capped, 1.0, share)
        if not (pi > 1.0 + 1e-12).any():
            return (1 - uniform_share) * pi + uniform_share * count / total
        capped |= pi > 1.0 + 1e-12


def systematic_sample(probabilities: Array, strata: Sequence[str], generator: np.random.Generator) -> NDArray[np.int64]:
    """Indices of exactly round(sum pi) groups (Madow 1949): equal steps along the cumulated probabilities, groups ordered
    by stratum.

    The order inside a stratum is random; walking along the strata spreads the anchors over them in proportion. A fixed
    count, not coin flips: a random count alone would add (1/pi - 1) |grad J|^2 of variance (method 3.4).
    """
    shuffled = generator.permutation(len(probabilities))
    order = np.array(sorted(shuffled.tolist(), key=lambda k: strata[k]), dtype=np.int64)
    edges = np.cumsum(probabilities[order])
    count = round(float(edges[-1]))
    ticks = generator.random() + np.arange(count)
    chosen = np.searchsorted(edges * (count / edges[-1]), ticks, side="right")
    return np.sort(order[chosen.clip(max=len(order) - 1)])
