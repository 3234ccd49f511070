"""Online debiasing: a within-group ridge map that reaches the gradient, and per-task offsets for the dashboard (method 3.2).

Shape legend: B rollouts, F features of the domain, D = 1 + F regressors (prediction first).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wmrl.correction.advantages import group_sum


@dataclass(frozen=True)
class MapConfig:
    """slope_sd and feature_sd are prior standard deviations of (slope - 1) and of standardised feature weights (method
    3.12)."""

    discount: float = 0.99
    slope_sd: float = 0.5
    feature_sd: float = 0.3
    initial_noise: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ValueError(f"expected correction.map.discount in (0, 1], got {self.discount}")


def centred(values: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """(B, ...) minus the mean over the valid members of the group; 0 for invalid rows."""
    weight = valid.double().reshape(-1, *([1] * (values.dim() - 1)))
    clean = torch.where(weight > 0, values.double(), 0.0)
    mean = group_sum(clean, groups) / group_sum(weight, groups).clamp(min=1.0)
    return (clean - mean) * weight


class WithinGroupMap:
    """R~ = a rhat~ + gamma' phi~ + e on group-centred pairs (~), a ridge in information form that forgets towards the identity.

    Evidence E, h is discounted by `discount` at each step, whether or not data came; with the prior added when solving,
    v = (E + Lam_0)^-1 (h + Lam_0 v_0), v_0 = (1, 0), which equals Lam <- d Lam + (1 - d) Lam_0 of method 3.2. Features are
    standardised in the prior only (Lam_0 = feature variance / feature_sd^2), so old evidence stays valid when their scale
    moves.
    """

    def __init__(self, config: MapConfig, num_features: int) -> None:
        size = 1 + num_features
        self.config = config
        self._evidence = torch.zeros(size, size, dtype=torch.float64)
        self._target = torch.zeros(size, dtype=torch.float64)
        self._feature_power = torch.zeros(num_features, dtype=torch.float64)
        self._degrees = 0.0
        self._noise = config.initial_noise
        self._loss_identity = 0.0
        self._loss_map = 0.0

    @property
    def noise(self) -> float:
        """Moving average of the prequential squared residual, s_e^2."""
        return self._noise

    @property
    def helps(self) -> bool:
        """The map predicted past pairs, before seeing them, no worse than the raw prediction did."""
        return self._loss_map <= self._loss_identity

    @property
    def slope(self) -> float:
        return float(self._solve()[0][0])

    def _prior(self) -> tuple[Tensor, Tensor]:
        power = self._feature_power / max(self._degrees, 1.0)
        precision = torch.cat([torch.tensor([1.0 / self.config.slope_sd**2]), (power + 1e-6) / self.config.feature_sd**2])
        mean = torch.zeros_like(precision)
        mean[0] = 1.0
        return precision, mean

    def _solve(self) -> tuple[Tensor, Tensor]:
        """(D,) weights v and (D, D) covariance P."""
        precision, mean = self._prior()
        information = self._evidence + torch.diag(precision)
        covariance = torch.linalg.inv(information)
        return covariance @ (self._target + precision * mean), covariance

    def shift(self, predictions: Tensor, features: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What to add to each prediction, and the variance that the estimate of the map brings, (B,) each (zero-mean per
        group)."""
        z = self._regressors(predictions, features, groups, valid)
        weights, covariance = self._solve()
        return z @ weights - z[:, 0], ((z @ covariance) * z).sum(dim=1)

    def update(self, predictions: Tensor, features: Tensor, returns: Tensor, groups: Tensor, valid: Tensor) -> None:
        """Learn from pairs (B,) after they were used: prequential losses and noise first, then the evidence."""
        z = self._regressors(predictions, features, groups, valid)
        target = centred(returns, groups, valid)
        weights, _ = self._solve()
        residual, identity = target - z @ weights, target - z[:, 0]
        degrees = _degrees_of_freedom(groups, valid)
        d = self.config.discount
        if degrees > 0:
            memory = 0.99**degrees
            self._noise = memory * self._noise + (1 - memory) * max(float((residual**2).sum()) / degrees, 1e-4)
        self._loss_map = d * self._loss_map + float((residual**2).sum())
        self._loss_identity = d * self._loss_identity + float((identity**2).sum())
        self._degrees = d * self._degrees + degrees
        self._feature_power = d * self._feature_power + (z[:, 1:] ** 2).sum(dim=0)
        self._evidence = d * self._evidence + z.T @ z / self._noise
        self._target = d * self._target + z.T @ target / self._noise

    def forget(self, keep: float) -> None:
        """A new model version: keep this share of the evidence instead of restarting."""
        self._evidence, self._target = self._evidence * keep, self._target * keep
        self._loss_identity, self._loss_map = self._loss_identity * keep, self._loss_map * keep

    def _regressors(self, predictions: Tensor, features: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
        stacked = torch.cat([predictions.double()[:, None], features.double()], dim=1)
        if stacked.shape[1] != len(self._target):
            raise ValueError(f"expected {len(self._target) - 1} features per rollout, got {features.shape[1]}")
        return centred(stacked, groups, valid)

    def state_dict(self) -> dict[str, Any]:
        return {
            "evidence": self._evidence.clone(),
            "target": self._target.clone(),
            "feature_power": self._feature_power.clone(),
            "degrees": self._degrees,
            "noise": self._noise,
            "losses": [self._loss_identity, self._loss_map],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evidence, self._target = state["evidence"].clone(), state["target"].clone()
        self._feature_power, self._degrees, self._noise = state["feature_power"].clone(), state["degrees"], state["noise"]
        self._loss_identity, self._loss_map = state["losses"]


def _degrees_of_freedom(groups: Tensor, valid: Tensor) -> int:
    """sum over groups of (valid members - 1)."""
    return int(valid.sum()) - len(groups[valid].unique())


class Offsets:
    """Bias of the model per task, prediction minus real, for the log: discounted mean with a normal interval over groups.

    Offsets cancel in every group-relative gradient (method 3.1), so nothing here touches the policy.
    """

    def __init__(self, discount: float = 0.9) -> None:
        self.discount = discount
        self._sums: dict[str, list[float]] = {}

    def update(self, keys: list[str], gaps: list[float]) -> None:
        """One mean gap per anchor group, with the group's task."""
        for sums in self._sums.values():
            sums[:] = [self.discount * s for s in sums[:3]] + [self.discount**2 * sums[3]]
        for key, gap in zip(keys, gaps, strict=True):
            sums = self._sums.setdefault(key, [0.0, 0.0, 0.0, 0.0])
            sums[:] = [sums[0] + 1, sums[1] + gap, sums[2] + gap * gap, sums[3] + 1]

    def task(self, key: str) -> float:
        """Discounted mean bias of one task, 0 when nothing is known."""
        sums = self._sums.get(key)
        return sums[1] / sums[0] if sums else 0.0

    def pooled(self) -> tuple[float, float, float]:
        """(mean, low, high) of the bias over all tasks, 95 %; nan before the first pair, infinite bounds before the second."""
        count, total, square, weight = (sum(s[i] for s in self._sums.values()) for i in range(4))
        if count == 0:
            return math.nan, math.nan, math.nan
        mean, effective = total / count, count * count / weight
        if effective < 1.5:
            return mean, -math.inf, math.inf
        half = 1.96 * math.sqrt(max(square / count - mean * mean, 0.0) / (effective - 1))
        return mean, mean - half, mean + half

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {key: list(s) for key, s in self._sums.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = {key: list(s) for key, s in state["sums"].items()}
