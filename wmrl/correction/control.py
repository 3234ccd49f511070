"""Moments of paired advantages: the control-variate coefficient l and the variance ratio w, estimated online and lagged
(method 3.4).

Shape legend: B pairs, T decisions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wmrl.types import Rollouts


class Moments:
    """Discounted S_RF, S_FF, S_RR of real and debiased predicted advantages on pairs. Read before a step, moved after it."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self._sums = [0.0, 0.0, 0.0]

    def update(self, real: Tensor, imagined: Tensor, same: Tensor) -> None:
        """Take in one step's pairs: advantages (B, T) each, and the share of tokens that both chose alike (B, T).

        Twins whose decision differed have nearly orthogonal scores, so their product does not reach the gradient's covariance.
        """
        added = (real * imagined * same, imagined**2, real**2)
        self._sums = [self.memory * old + float(new.sum()) for old, new in zip(self._sums, added, strict=True)]

    def control(self, correlation: float, degrees: float) -> float:
        """l = S_RF / S_FF in [0, 1], shrunken by 1 - (1 - rho^2) / (rho^2 (nu - 2)), and 0 while rho^2 nu < 4 or the pairs
        disagree."""
        product, power, _ = self._sums
        squared = correlation**2
        if power <= 1e-12 or product <= 0 or correlation <= 0 or degrees <= 2 or squared * degrees < 4:
            return 0.0
        shrink = max(0.0, 1 - (1 - squared) / (squared * (degrees - 2)))
        return min(product / power, 1.0) * shrink

    def variance_ratio(self, largest: float) -> float:
        """w = V_F / V_R for inverse-variance fusion, in [1/4, largest]; 1 (pooling) without evidence. Below 1 where real
        rewards are the noisier ones (method 5, pitfall 12)."""
        _, predicted, real = self._sums
        return min(max(predicted / real, 0.25), largest) if predicted > 1e-12 and real > 1e-12 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = list(state["sums"])


def same_decisions(first: Rollouts, second: Rollouts) -> Tensor:
    """(B, T) share of tokens that twins chose alike; the tokens are the leading K numbers of the flattened action."""
    tokens = first.log_probs.shape[2]
    alike = (first.actions.flatten(2)[..., :tokens] - second.actions.flatten(2)[..., :tokens]).abs() < 1e-4
    return alike.double().mean(dim=2)
