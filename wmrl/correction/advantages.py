"""Advantages: linear leave-one-out, per decision, with soft endings and a predictable task scale (method 3.1).

Shape legend: B rollouts, T decisions. Groups are numbered (B,) as `Rollouts.group_index` does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wmrl.types import Rollouts, Start


def task_key(start: Start) -> str:
    """What counts as one task for scales, offsets and strata: the task and its instruction."""
    return f"{start.task}|{start.instruction}"


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """(B, ...) -> (B, ...): every row gets the sum over its group."""
    count = int(groups.max()) + 1 if len(groups) else 0
    totals = values.new_zeros((count, *values.shape[1:])).index_add_(0, groups, values)
    return totals[groups]


def group_reference(values: Tensor, groups: Tensor) -> Tensor:
    """(B,) -> (B,): a value of the group itself (its smallest). Subtracting it first makes equal rewards cancel exactly."""
    count = int(groups.max()) + 1 if len(groups) else 0
    return values.new_full((count,), math.inf).scatter_reduce(0, groups, values, "amin")[groups]


def leave_one_out(values: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the OTHER members of the group, sum_{j != i} w_j r_j / sum_{j != i} w_j; (B,), a row's own value
    where nobody else has weight (its advantage is then 0: a group of one has no baseline, method 3.11).

    Any weights that do not depend on the row's own reward keep the gradient unbiased (method 3.5).
    """
    reference = group_reference(values, groups)
    shifted = values - reference
    others = group_sum(weights, groups) - weights
    total = group_sum(weights * shifted, groups) - weights * shifted
    alone = others <= 1e-12
    return torch.where(alone, values, reference + total / torch.where(alone, 1.0, others))


def advantages(rollouts: Rollouts, *, correction: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Leave-one-out advantages (B, T), float64, not yet divided by the task scale.

    A_t = (reward to go)_t + mask_t * (correction_i - baseline_i), baseline = leave-one-out mean of the (corrected) returns.
    For hard endings and a sparse reward this is r_i - mean_{j != i} r_j at every decision taken (equation (1) of method
    3.1); for soft endings it is its expectation over the hard ones (Rao-Blackwell), since rewards and mask carry the
    survival probability. Rollouts without an outcome get 0 and stay out of every baseline. Equal returns of hard rollouts
    give exactly 0.

    correction (B,): debiased minus predicted return, entering as a terminal reward. weights (B,): of the baseline, default
    equal.
    """
    groups, valid = rollouts.group_index(), rollouts.valid()
    rewards, mask = rollouts.rewards.double(), rollouts.mask.double()
    extra = torch.zeros(len(rollouts), dtype=torch.float64) if correction is None else correction.double()
    usable = valid.double() if weights is None else valid * weights.double()
    returns = torch.where(valid, rewards.sum(dim=1) + extra, math.inf)
    reference = group_reference(returns, groups)
    reference = torch.where(torch.isfinite(reference), reference, 0.0)
    shifted = torch.where(valid, returns - reference, 0.0)
    baseline = leave_one_out(shifted, groups, usable)
    to_go = rewards.flip(1).cumsum(1).flip(1) + mask * (extra - reference)[:, None]
    result = to_go - mask * baseline[:, None]
    return torch.where((valid & _has_peer(groups, usable))[:, None], result, 0.0)


def _has_peer(groups: Tensor, usable: Tensor) -> Tensor:
    present = (usable > 0).double()
    return group_sum(present, groups) - present > 0


def lambda_advantages(rewards: Tensor, values: Tensor, mask: Tensor, *, decay: float, bootstrap: Tensor) -> Tensor:
    """TD(lambda) advantages (B, T) with a state-dependent baseline (Schulman et al. 2016, eq. 16, discount 1), soft endings
    allowed.

    delta_t = rewards_t + mask_{t+1} V_{t+1} - mask_t V_t; A_t = delta_t + decay * A_{t+1}. rewards and mask (B, T) are
    unconditional (see `Rollouts`); values (B, T+1) are conditional on running; bootstrap (B,) stands for mask_{T+1}: the
    probability that the rollout was still running when it was cut off (0 for a true end, so that only a cut-off is
    bootstrapped).
    """
    following = torch.cat([mask[:, 1:], bootstrap[:, None]], dim=1)
    residuals = rewards + following * values[:, 1:] - mask * values[:, :-1]
    result = torch.zeros_like(rewards)
    carried = torch.zeros_like(bootstrap)
    for t in range(rewards.shape[1] - 1, -1, -1):
        carried = residuals[:, t] + decay * carried
        result[:, t] = carried
    return result


def real_advantages(real: Rollouts, *, decay: float) -> Tensor:
    """(B, T) of real rollouts, float64: by the critic's `values` where there are some, else leave-one-out.

    With values, TD(lambda) residuals give each decision the change it made to the expected outcome (`decay` 1: outcome minus
    value, no credit between decisions). A deadline belongs to the task, so nothing is bootstrapped beyond it.
    """
    if real.values is None:
        return advantages(real)
    bootstrap = torch.zeros(len(real), dtype=torch.float64)
    result = lambda_advantages(
        real.rewards.double(), real.values.double(), real.mask.double(), decay=decay, bootstrap=bootstrap
    )
    return torch.where(real.valid()[:, None] & (real.mask > 0), result, 0.0)


def uninformative_groups(rollouts: Rollouts) -> tuple[int, int]:
    """(groups whose valid members all have one return, all groups): the first make no policy gradient and are shown in the
    log."""
    groups, valid = rollouts.group_index(), rollouts.valid()
    returns, total = rollouts.returns(), int(groups.max()) + 1
    same = sum(len(returns[(groups == g) & valid].unique()) <= 1 for g in range(total))
    return same, total


class TaskScale:
    """Predictable scale per task: root of a moving average of past within-group variances of real returns, floored.

    Per-group standardisation would turn pure noise on an equal-reward group into a full-size step (method 3.1); a scale
    from the past is a constant of this step.
    """

    def __init__(self, *, initial: float = 0.5, floor: float = 0.25, memory: float = 0.9) -> None:
        self.initial, self.floor, self.memory = initial, floor, memory
        self._variance: dict[str, float] = {}

    def __call__(self, starts: tuple[Start, ...]) -> Tensor:
        """(B,) float64 scale of each rollout."""
        table = {key: math.sqrt(v) for key, v in self._variance.items()}
        return torch.tensor([max(self.floor, table.get(task_key(s), self.initial)) for s in starts], dtype=torch.float64)

    def update(self, real: Rollouts) -> None:
        """Move the averages with this step's real returns; call it after the step's coefficients are formed."""
        keep = real[real.valid()]
        if not len(keep):
            return
        groups, returns = keep.group_index(), keep.returns().double()
        sizes = group_sum(torch.ones_like(returns), groups)
        centred = returns - group_sum(returns, groups) / sizes
        keys = [task_key(s) for s in keep.starts]
        for key in dict.fromkeys(keys):
            rows = torch.tensor([k == key for k in keys]) & (sizes > 1)
            degrees = float(((sizes - 1) / sizes)[rows].sum())
            if degrees > 0:
                variance = float((centred[rows] ** 2).sum()) / degrees
                old = self._variance.get(key, self.initial**2)
                self._variance[key] = self.memory * old + (1 - self.memory) * variance

    def state_dict(self) -> dict[str, Any]:
        return {"variance": dict(self._variance)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._variance = dict(state["variance"])
