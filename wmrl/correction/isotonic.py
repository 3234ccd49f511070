"""The isotonic option of debiasing: a monotone map of the group-centred prediction, on a bounded memory of pairs.

Shape legend: B rollouts, N pairs in memory, K knots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def monotone_fit(x: Array, y: Array, weights: Array) -> Array:
    """Knots (K, 3) of the weighted least-squares non-decreasing function of x (N,): place, value, and 1 / weight of its block.

    Pool-adjacent-violators (Ayer et al. 1955): a block of pairs shares their weighted mean, whose variance is therefore s^2 /
    weight.
    """
    from sklearn.isotonic import IsotonicRegression  # here, since it takes as long to import as torch and few runs need it

    fitted = IsotonicRegression(out_of_bounds="clip").fit(x, y, sample_weight=weights)
    places, values = fitted.X_thresholds_, fitted.y_thresholds_
    order = np.argsort(x)
    cumulated = np.concatenate([[0.0], np.cumsum(weights[order])])
    levels, first = np.unique(values, return_index=True)
    last = np.append(first[1:], len(values)) - 1
    low = np.searchsorted(x[order], places[first], side="left")
    high = np.searchsorted(x[order], places[last], side="right")
    block = (cumulated[high] - cumulated[low])[np.searchsorted(levels, values)]
    return np.stack([places, values, 1.0 / block], axis=1)


def interpolate(knots: Array, x: Array) -> tuple[Array, Array]:
    """Value and 1 / weight at x (B,), linear between the knots and constant beyond them."""
    return np.interp(x, knots[:, 0], knots[:, 1]), np.interp(x, knots[:, 0], knots[:, 2])


class IsotonicMap:
    """A monotone map of centred predictions, refitted every `refit_every` pairs on the last `capacity` ones, and on probation.

    It only sees values that are centred inside their group: pooled over tasks, a score's level would stand for the task
    (Simpson's paradox). `accepted` says whether to use it: at least `fewest` effective pairs, and a prequential loss below the
    linear map's on the same pairs, both discounted by `memory` per step. Flat blocks tie predictions and so delete signal,
    which the loss within groups charges it for.
    """

    def __init__(self, memory: float, *, capacity: int = 5000, refit_every: int = 64, fewest: float = 200.0) -> None:
        self.memory, self.capacity, self.refit_every, self.fewest = memory, capacity, refit_every, fewest
        self._pairs = torch.zeros(0, 3, dtype=torch.float64)
        self._knots = torch.zeros(0, 3, dtype=torch.float64)
        self._waiting = 0
        self._losses = [0.0, 0.0]

    @property
    def effective_pairs(self) -> float:
        """Sum of the weights in memory."""
        return float(self._pairs[:, 2].sum())

    @property
    def fitted(self) -> bool:
        return len(self._knots) > 0

    @property
    def accepted(self) -> bool:
        own, linear = self._losses
        return self.fitted and self.effective_pairs >= self.fewest and own < linear

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Centred real return expected at a centred prediction x (B,), and its variance in units of the noise; call it when
        `fitted`."""
        value, share = interpolate(self._knots.numpy(), x.numpy())
        return torch.from_numpy(value), torch.from_numpy(share)

    def judge(self, own: float, linear: float) -> None:
        """Squared losses of both maps on one step's pairs, before either has learned from them."""
        self._losses = [self.memory * old + new for old, new in zip(self._losses, (own, linear), strict=True)]

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> None:
        """Centred pairs (B,) with weights (B,) that sum to what they are worth in independent pairs."""
        kept = weights > 0
        new = torch.stack([x, y, weights], dim=1)[kept]
        self._pairs = torch.cat([self._pairs, new])[-self.capacity :].clone()
        self._waiting += len(new)
        if self._waiting >= self.refit_every and self.effective_pairs >= self.fewest:
            x_all, y_all, w_all = self._pairs.numpy().T
            self._knots = torch.from_numpy(monotone_fit(x_all, y_all, w_all))
            self._waiting = 0

    def forget(self, keep: float) -> None:
        """A new model version: every pair in memory, and every loss, counts for this share."""
        self._pairs = self._pairs * torch.tensor([1.0, 1.0, keep], dtype=torch.float64)
        self._losses = [keep * loss for loss in self._losses]

    def state_dict(self) -> dict[str, Any]:
        """Of bounded size; the fitted map is restored from its knots, to the last bit."""
        return {
            "pairs": self._pairs.clone(),
            "knots": self._knots.clone(),
            "waiting": self._waiting,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs, self._knots = state["pairs"].clone(), state["knots"].clone()
        self._waiting, self._losses = state["waiting"], list(state["losses"])
