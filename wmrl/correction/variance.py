"""How uncertain a prediction is, and what the weights made of it may do (method 3.3, 3.5).

Shape legend: B rollouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wmrl.correction.advantages import group_reference, group_sum


def prediction_variance(model: Tensor | None, map_variance: Tensor, *, factor: float, floor: float) -> Tensor:
    """sigma_i^2 = factor * model variance + phi~' P phi~ + floor^2 (method 3.3), (B,) float64.

    model (B,): variance of the predicted return (ensemble plus passes) or None; `floor` is a standard deviation in reward
    units.
    """
    reported = torch.zeros_like(map_variance) if model is None else model.double()
    known = torch.isfinite(reported)
    worst = reported[known].max() if bool(known.any()) else reported.new_tensor(0.0)
    clean = torch.where(known, reported, worst)
    return factor * clean + map_variance + floor**2


class VarianceCalibration:
    """c_sig: discounted ratio of squared prequential residuals on pairs to the variance that was claimed (method 3.3).

    Where real outcomes are 0 or 1, p (1 - p) of each squared residual is the outcome's own luck, not the prediction's error.
    """

    def __init__(self, memory: float = 0.97) -> None:
        self.memory = memory
        self._sums = [0.0, 0.0]

    @property
    def ratio(self) -> float:
        """Unclipped; 1 before the first pair."""
        return max(self._sums[0], 0.0) / self._sums[1] if self._sums[1] > 0 else 1.0

    @property
    def factor(self) -> float:
        return min(max(self.ratio, 0.25), 16.0)

    def update(self, returns: Tensor, predicted: Tensor, residual: Tensor, claimed: Tensor) -> None:
        """returns, predicted, group-centred residual and claimed variance of the valid pairs, (B,) each."""
        if not len(returns):
            return
        binary = bool(((returns == 0) | (returns == 1)).all())
        chance = predicted.clamp(0, 1)
        luck = chance * (1 - chance) if binary else torch.zeros_like(chance)
        excess, total = float((residual**2 - luck).sum()), float(claimed.sum())
        self._sums = [self.memory * self._sums[0] + excess, self.memory * self._sums[1] + total]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = list(state["sums"])


def spread_variance(values: Tensor, variance: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """S2 = max(0, Var_G(f) - mean sigma^2): the true spread inside each group (B,), noise taken out (method 3.1)."""
    weight = valid.double()
    size = group_sum(weight, groups)
    mean = group_sum(values * weight, groups) / size.clamp(min=1)
    power = group_sum(weight * (values - mean) ** 2, groups) / (size - 1).clamp(min=1)
    noise = group_sum(variance * weight, groups) / size.clamp(min=1)
    return (power - noise).clamp(min=0.0)


def baseline_weights(values: Tensor, variance: Tensor, groups: Tensor, valid: Tensor, *, max_ratio: float) -> Tensor:
    """w_j = 1 / (S2 + sigma_j^2) for the leave-one-out baseline (B,), the ratio inside a group capped.

    They weigh the baseline of the other members, which costs no bias; never multiply a sample's own advantage by them
    (method 3.5).
    """
    total = spread_variance(values, variance, groups, valid) + variance
    return 1.0 / torch.minimum(total, group_reference(total, groups) * max_ratio)


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2; the weights' CV^2 is B / ESS - 1 (method 3.3)."""
    return float(weights.sum() ** 2 / (weights**2).sum())
