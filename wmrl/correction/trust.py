"""Trust: how much of the update may rest on the world model, judged by agreement inside groups (method 3.8).

Everything is measured on pairs whose prediction was fixed before the real outcome was seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from wmrl.correction.debias import centred
from wmrl.statistics import fisher_interval

ONE_SIDED = 1.645
"""Normal quantile of 95 %."""


class TrustState(Enum):
    """COLD: too little evidence. PPI: unbiased use only. FUSE: the model's mean is used too. DISTRUST: real only."""

    COLD = "cold"
    PPI = "ppi"
    FUSE = "fuse"
    DISTRUST = "distrust"


@dataclass(frozen=True)
class TrustConfig:
    """Thresholds on the evidence; `degrees` of freedom that end COLD; `full`: evidence of full confidence; limits of the
    alarms; what a step (`discount`) and a new model (`refresh_keep`) leave of the evidence.

    The evidence is the bounds of the within-group correlation of pairs at `z`, or, with keyframes, the correlation of proposed
    updates with real advantages in standard errors (`JUDGED_BY_UPDATES`).
    """

    discount: float = 0.99
    refresh_keep: float = 0.5
    degrees: float = 60.0
    ppi_enter: float = 0.2
    fuse_enter: float = 0.4
    fuse_leave: float = 0.3
    disagreement_limit: float = 0.8
    gap_limit: float = 0.3
    gap_trend_limit: float = 0.15
    unusable_limit: float = 0.05
    z: float = ONE_SIDED
    full: float = 1.0

    def __post_init__(self) -> None:
        if not self.ppi_enter <= self.fuse_leave:
            raise ValueError(f"expected trust.ppi_enter at most trust.fuse_leave, got {self.ppi_enter} and {self.fuse_leave}")
        if not 0 <= self.refresh_keep <= 1 or self.degrees < 0 or self.z <= 0:
            raise ValueError(
                "expected trust.refresh_keep in [0, 1], degrees at least 0 and z above 0, "
                f"got {self.refresh_keep}, {self.degrees} and {self.z}"
            )
        if self.full <= self.fuse_leave:
            raise ValueError(f"expected trust.full above trust.fuse_leave, got {self.full} and {self.fuse_leave}")
        if not self.fuse_leave < self.fuse_enter:
            raise ValueError(f"expected trust.fuse_leave below trust.fuse_enter, got {self.fuse_leave} and {self.fuse_enter}")
        if not 0 < self.discount <= 1:
            raise ValueError(f"expected trust.discount in (0, 1], got {self.discount}")


JUDGED_BY_UPDATES = TrustConfig(
    refresh_keep=1.0,
    ppi_enter=-1.0,
    fuse_enter=-0.5,
    fuse_leave=-1.0,
    full=0.0,
    disagreement_limit=math.inf,
)
"""With keyframes, in standard errors of the correlation. A single decision decides little, so even a right update correlates
with real advantages by some hundredths, while the standard error is 0.04 after the 600 decisions of the base rollouts. The
world model therefore has the benefit of the doubt: the whole dose at 0, none at one standard error below it. A model whose
updates do nothing passes the first verdict with the odds of 0.69. A large gap closes the gate too. A fit on more real
rollouts of the same kind takes no evidence away."""


class Agreement:
    """Discounted moments of group-centred pairs: real R~ and predicted f~, with their degrees of freedom."""

    def __init__(self) -> None:
        self.real_power = self.predicted_power = self.product = self.difference_power = self.degrees = 0.0

    def discount(self, keep: float) -> None:
        for name in vars(self):
            setattr(self, name, keep * getattr(self, name))

    def add(self, real: Tensor, predicted: Tensor, groups: Tensor, valid: Tensor) -> None:
        """Pairs (B,). Groups whose real returns are all equal stay in the sums (they say that predicted spread is
        spurious), but widen the interval: they bring no degrees of freedom, since no agreement could have shown there."""
        r, f = centred(real, groups, valid), centred(predicted, groups, valid)
        self.real_power += float((r * r).sum())
        self.predicted_power += float((f * f).sum())
        self.product += float((r * f).sum())
        self.difference_power += float(((r - f) ** 2).sum())
        spread = {int(g) for g in groups[valid & (r.abs() > 1e-9)]}
        self.degrees += sum(int(((groups == g) & valid).sum()) - 1 for g in spread)

    @property
    def correlation(self) -> float:
        """rho_w; 0 while one side has no spread."""
        power = self.real_power * self.predicted_power
        return self.product / math.sqrt(power) if power > 1e-20 else 0.0

    @property
    def disagreement(self) -> float:
        """s^2 = sum (A^F - A^R)^2 / sum (A^R)^2, a ratio of sums that keeps constant-reward groups."""
        return self.difference_power / self.real_power if self.real_power > 1e-12 else math.inf

    @property
    def standard_errors(self) -> float:
        """The correlation in its own standard errors (Fisher's transformation)."""
        limited = min(max(self.correlation, -1 + 1e-9), 1 - 1e-9)
        return math.atanh(limited) * math.sqrt(max(self.degrees - 3.0, 0.0))

    def bounds(self, z: float) -> tuple[float, float]:
        return fisher_interval(self.correlation, self.degrees, z)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Trust:
    """The state machine of method 3.8 with hysteresis; `update` is called once per step, after the step's coefficients are
    formed."""

    def __init__(self, config: TrustConfig, *, of_updates: bool = False) -> None:
        self.config = config
        self._of_updates = of_updates
        self.state = TrustState.COLD
        self.agreement = Agreement()
        self.vetoed = False
        self._fast_gap = self._slow_gap = self._gap_weight = 0.0
        self._unusable = 0.0

    @property
    def gap(self) -> float:
        """Recent mean of predicted minus real return on pairs: what the policy gains in the model only."""
        return self._fast_gap

    @property
    def exploited(self) -> bool:
        """The model promises much more than the real world gives. With pairs this is an alarm for the log: a constant gap
        cancels inside groups, and only a growing one closes the gate."""
        return self._fast_gap > self.config.gap_limit

    @property
    def alarmed(self) -> bool:
        """The gap closes the gate: it grows, since the policy climbs the model's errors; from keyframes, it is large."""
        growing = self._fast_gap - self._slow_gap > self.config.gap_trend_limit
        return growing or (self._of_updates and self.exploited)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the correlation, one-sided 95 % unless the config says otherwise."""
        return self.agreement.bounds(self.config.z)

    @property
    def evidence(self) -> tuple[float, float]:
        """What the thresholds are compared with: the bounds, or the correlation in standard errors, twice."""
        if not self._of_updates:
            return self.bounds
        errors = self.agreement.standard_errors
        return errors, errors

    def watch(self, gaps: Tensor) -> None:
        """Take in one step's predicted minus real returns of pairs (B,): what the alarms look at."""
        if not len(gaps):
            return
        gap = float(gaps.mean())
        self._gap_weight += 1.0
        self._fast_gap += max(0.3, 1 / self._gap_weight) * (gap - self._fast_gap)
        self._slow_gap += max(0.03, 1 / self._gap_weight) * (gap - self._slow_gap)

    def update(self, unusable_share: float) -> TrustState:
        """Move the state on all evidence so far, then discount it by one step."""
        self._unusable = 0.8 * self._unusable + 0.2 * unusable_share
        self.state = self._next()
        self.agreement.discount(self.config.discount)
        return self.state

    def _next(self) -> TrustState:
        c = self.config
        low, high = self.evidence
        if self.vetoed or self._unusable > c.unusable_limit:
            return TrustState.DISTRUST
        if self.state is TrustState.COLD and self.agreement.degrees < c.degrees:
            return TrustState.COLD
        if high < c.ppi_enter:
            return TrustState.DISTRUST
        if self.state is TrustState.FUSE and low >= c.fuse_leave and not self.alarmed:
            return TrustState.FUSE
        if low > c.fuse_enter and not self.alarmed and self.agreement.disagreement < c.disagreement_limit:
            return TrustState.FUSE
        if low > c.ppi_enter or self.state is TrustState.FUSE:
            return TrustState.PPI
        return self.state

    def refreshed(self) -> None:
        """A new model version: evidence is discounted, not restarted. The gap is not: that it grows over versions is what the
        alarm looks for."""
        self.agreement.discount(self.config.refresh_keep)

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "vetoed": self.vetoed,
            "agreement": self.agreement.state_dict(),
            "gap": [self._fast_gap, self._slow_gap, self._gap_weight],
            "unusable": self._unusable,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = TrustState(state["state"])
        self.vetoed, self._unusable = state["vetoed"], state["unusable"]
        self.agreement.load_state_dict(state["agreement"])
        self._fast_gap, self._slow_gap, self._gap_weight = state["gap"]
