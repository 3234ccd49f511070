"""Real and imagined advantages become one coefficient per decision: the two-parameter family (kappa, l) of method 3.4 and 3.9.

Shape legend: B rollouts, T decisions; n anchor groups among m imagined groups, G members each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wmrl.types import Rollouts


@dataclass(frozen=True)
class Weighted:
    """Rollouts with the coefficient (B, T) that multiplies the score of each of their decisions."""

    rollouts: Rollouts
    coefficients: Tensor


@dataclass(frozen=True)
class Combination:
    """kappa: trust dial, share of the model's own mean (bias is kappa * beta). l: control-variate coefficient (any fixed l
    is unbiased)."""

    kappa: float
    l: float  # noqa: E741 - the symbol of method 3.4


REAL_ONLY = Combination(0.0, 0.0)
MODEL_ONLY = Combination(1.0, 0.0)


def fusion(num_anchors: int, num_groups: int, variance_ratio: float) -> Combination:
    """Inverse-variance fusion as a member of the family: kappa = N / (N + n w), l = 1 / w, N = m - n (method 3.4, identity
    E3)."""
    rest = num_groups - num_anchors
    return Combination(rest / (rest + num_anchors * variance_ratio), 1.0 / variance_ratio)


def real_coefficients(advantages: Tensor, weights: Tensor, combination: Combination) -> Tensor:
    """(1 - kappa) * w_k * A^R (B, T). weights (B,): 1/n for evenly chosen anchors, 1/(m pi_k) for others, over G."""
    return (1 - combination.kappa) * weights[:, None] * advantages


def imagined_coefficients(advantages: Tensor, share: Tensor, twin_weights: Tensor, combination: Combination) -> Tensor:
    """[(kappa + (1 - kappa) l) / m - 1{anchor} (1 - kappa) l w_k] * A^F (B, T): equation (4), its S1 form of method 3.9.

    share (B,): 1/m over G. twin_weights (B,): w_k over G where the rollout's real counterpart was used, 0 elsewhere.
    """
    kappa, l = combination.kappa, combination.l  # noqa: E741
    return ((kappa + (1 - kappa) * l) * share - (1 - kappa) * l * twin_weights)[:, None] * advantages


def match(imagined: Rollouts, real: Rollouts) -> Tensor:
    """(B real,) row of the imagined rollout with the same start, instruction and member; -1 where there is none."""
    table = {(s.group_key, int(m)): row for row, (s, m) in enumerate(zip(imagined.starts, imagined.member, strict=True))}
    return torch.tensor(
        [table.get((s.group_key, int(m)), -1) for s, m in zip(real.starts, real.member, strict=True)], dtype=torch.long
    )


def merge(real: Tensor, imagined: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Add the real coefficients (B, T) to those of the same samples `rows` (B,) in the imagined batch, leaving 0 behind.

    A sample that was both predicted and executed must meet the ratio clip once, with one coefficient (method 3.4).
    """
    matched = rows >= 0
    joined = imagined.index_add(0, rows[matched], real[matched])
    return torch.where(matched[:, None], 0.0, real), joined


def mass(coefficients: Tensor) -> float:
    """Sum of |coefficients|: how much of an update rests on these rollouts."""
    return float(coefficients.abs().sum())
