"""Do real decisions endorse an update that imagination proposed?

Shape legend: B rollouts, T decisions, D judged decisions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wmrl.correction.advantages import real_advantages
from wmrl.types import Rollouts


class Judged(NamedTuple):
    """Each (D,): real advantage, what the update changes in its own standard deviation, number of the decision, all true."""

    gain: Tensor
    change: Tensor
    decision: Tensor
    valid: Tensor


def judged_decisions(real: Rollouts, change: Tensor) -> Judged | None:
    """Pair what the updates change of each real decision's probability, change (B, T) (`wmrl.proposal.relative_change`), with
    its real advantage; None where nothing changes. The rollouts had no part in the updates.

    The product has the mean of the real gain, to first order; where the decision has no influence its mean is 0, since
    decisions were drawn at random. It asks for the direction alone: errors of the model that differ from state to state cancel
    in it as they do in the update itself. The change is in its own deviation, so that a probe of two updates says as much as a
    full dose.
    """
    judged = real.valid()[:, None] & (real.mask > 0)
    changed = change.double()[judged]
    spread = float(changed.std()) if len(changed) > 1 else 0.0
    if not math.isfinite(spread) or spread < 1e-9:
        return None
    gain, decision = real_advantages(real, decay=1.0)[judged], judged.nonzero()[:, 1]
    return Judged(gain, changed / spread, decision, torch.ones_like(decision, dtype=torch.bool))
