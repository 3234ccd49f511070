"""The exam of a robot world model: what it says about recorded real rollouts that it never saw, before any imagined update.

Shape legend: B rollouts, T decisions, E ensemble members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wmrl.correction.judging import judged_decisions
from wmrl.correction.trust import Agreement
from wmrl.statistics import (
    auroc,
    brier_score,
    paired_bootstrap,
    wilson_interval,
    within_group_correlation,
)
from wmrl.types import Rollouts, concatenate


@dataclass(frozen=True)
class ExamConfig:
    """Limits of the verdict, and the number of folds when a model is examined on the data it learns from."""

    folds: int = 2
    red_correlation: float = 0.0
    """RED when the upper bound of the within-start correlation lies below this."""
    red_false_success: float = 0.5
    """RED when more than this share of real failures is imagined as success."""
    updates: int = 16
    """Updates that each fold's model proposes, judged on the real decisions of the other folds (keyframes)."""
    green_correlation: float = 0.4
    green_gap: float = 0.10

    def __post_init__(self) -> None:
        if self.folds < 2:
            raise ValueError(f"expected at least 2 folds (a model may not judge its own training data), got {self.folds}")


@dataclass(frozen=True)
class Exam:
    """The result; every number with the count it rests on. `verdict` is GREEN, AMBER or RED; RED is a veto."""

    verdict: str
    reasons: tuple[str, ...]
    rollouts: int
    groups: int
    real_success: float
    real_interval: tuple[float, float]
    real_hazard: float
    replayed_hazard: float
    real_hazard_by_decision: tuple[float, ...]
    replayed_hazard_by_decision: tuple[float, ...]
    imagined_success: float
    gap: float
    gap_interval: tuple[float, float]
    auroc_by_decision: tuple[float, ...]
    auroc: float
    brier: float
    false_success: float
    within_start_twin: float
    within_start_interval: tuple[float, float]
    sign_agreement: float
    best_of_group_gain: float
    best_of_group_interval: tuple[float, float]
    one_chunk_error: float
    update_agreement: float = float("nan")
    update_interval: tuple[float, float] = (-1.0, 1.0)
    update_decisions: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """What a person reads before the first imagined update."""
        low, high = self.real_interval
        return [
            f"exam: {self.verdict} ({'; '.join(self.reasons) or 'every limit kept'})",
            f"  on {self.rollouts} real rollouts of {self.groups} starts that the examined model never saw (cross-fitted)",
            f"  success: real {self.real_success:.2f} [{low:.2f}, {high:.2f}], imagined {self.imagined_success:.2f}; "
            f"gap {self.gap:+.2f} [{self.gap_interval[0]:+.2f}, {self.gap_interval[1]:+.2f}]",
            f"  replay of the recorded actions, success in a decision: real {self.real_hazard:.3f}, replayed "
            f"{self.replayed_hazard:.3f}, AUROC {self.auroc:.2f}",
            f"    by decision: real {_row(self.real_hazard_by_decision)}, replayed {_row(self.replayed_hazard_by_decision)}, "
            f"AUROC {_row(self.auroc_by_decision)}",
            f"  twins: Brier {self.brier:.3f}, real failures imagined as success {self.false_success:.2f}",
            f"  within-start agreement of real and imagined returns {self.within_start_twin:+.2f} "
            f"[{self.within_start_interval[0]:+.2f}, {self.within_start_interval[1]:+.2f}], sign {self.sign_agreement:.2f}",
            f"  best of {self.extra.get('group_size', 0)} by the model: {self.best_of_group_gain:+.2f} "
            f"[{self.best_of_group_interval[0]:+.2f}, {self.best_of_group_interval[1]:+.2f}] "
            "over the group's mean real success",
            *self._update_lines(),
        ]

    def _update_lines(self) -> list[str]:
        """With keyframes: the evidence that counts."""
        if not self.update_decisions:
            return []
        low, high = self.update_interval
        return [
            f"  updates imagined from keyframes, judged by {self.update_decisions} real decisions that the model never saw: "
            f"correlation {self.update_agreement:+.3f} [{low:+.3f}, {high:+.3f}] (0: useless)"
        ]


def cross_fit(
    real: Rollouts, extra: Rollouts | None, folds: int, examine_fold: Callable[[Rollouts, Rollouts], Any]
) -> list[Any]:
    """Call `examine_fold(training, held_out)` once per fold (`Rollouts.folds`); `extra` rollouts only ever train."""
    fold_of = real.folds(folds)
    if int(fold_of.max()) + 1 < folds:
        raise ValueError(
            f"expected at least {folds} groups of some instruction for {folds} folds, got {int(fold_of.max()) + 1}; "
            "collect more starts"
        )
    results = []
    for fold in range(folds):
        held_out = fold_of == fold
        training = real[~held_out]
        results.append(examine_fold(training if extra is None else concatenate([training, extra]), real[held_out]))
    return results


def examine(
    real: Rollouts,
    hazards: Tensor,
    twin: Rollouts,
    one_chunk_error: float,
    config: ExamConfig,
    *,
    change: Tensor | None = None,
) -> Exam:
    """Compare real rollouts with the model's replay of their actions (`hazards` (E, B, T)) and with their imagined twins (same
    order); and, where imagination begins at keyframes, with the relative change (B, T) that proposed updates make to the
    probability of the real decisions.

    Replay is judged decision by decision, among the rollouts that still ran: does the model give a higher probability to those
    that succeed in this decision? Judged over whole rollouts it would be meaningless, since a success stops being replayed
    where it ended, while a failure gets a chance at every decision until the deadline.
    """
    outcome = real.returns()
    at_risk, hazard = real.mask > 0, hazards.mean(0)
    by_decision, overall = hazard_auroc(hazard, real.rewards, at_risk)
    imagined = twin.returns()
    group = real.group_index()
    agreement = within_group_correlation(outcome, imagined, group)
    gaps = imagined - outcome
    best, best_interval = best_of_group(outcome, imagined, group)
    values: dict[str, Any] = {
        "rollouts": len(real),
        "groups": int(group.max()) + 1,
        "real_success": outcome.mean().item(),
        "real_interval": tuple(wilson_interval(int((outcome > 0.5).sum()), len(real))[1:]),
        "real_hazard": real.rewards[at_risk].mean().item(),
        "replayed_hazard": hazard[at_risk].mean().item(),
        "real_hazard_by_decision": by_columns(real.rewards, at_risk),
        "replayed_hazard_by_decision": by_columns(hazard, at_risk),
        "imagined_success": imagined.mean().item(),
        "gap": gaps.mean().item(),
        "gap_interval": mean_interval(group_means(gaps, group)),
        "auroc_by_decision": by_decision,
        "auroc": overall,
        "brier": brier_score(imagined, outcome),
        "false_success": _share(imagined > 0.5, outcome < 0.5),
        "within_start_twin": agreement.estimate,
        "within_start_interval": (agreement.low, agreement.high),
        "sign_agreement": sign_agreement(outcome, imagined, group),
        "best_of_group_gain": best,
        "best_of_group_interval": best_interval,
        "one_chunk_error": one_chunk_error,
        "extra": {"group_size": len(real) // (int(group.max()) + 1)},
    }
    if change is not None:
        values |= agreement_of_updates(real, change)
    verdict, reasons = judge(values, config, by_updates=change is not None)
    return Exam(verdict=verdict, reasons=reasons, **values)


def agreement_of_updates(real: Rollouts, change: Tensor) -> dict[str, Any]:
    """What trust is told of these updates (`Correction.judge_updates`): correlation, 95 % interval, number of decisions."""
    judged, agreement = judged_decisions(real, change), Agreement()
    if judged is not None:
        agreement.add(*judged)
    decisions = 0 if judged is None else len(judged.gain)
    return {
        "update_agreement": agreement.correlation,
        "update_interval": agreement.bounds(1.96),
        "update_decisions": decisions,
    }


def by_columns(values: Tensor, at_risk: Tensor) -> tuple[float, ...]:
    """Mean of values (B, T) in each decision over the rollouts that still ran there; NaN where none did."""
    counts = at_risk.sum(0)
    return tuple((torch.where(at_risk, values, 0.0).sum(0) / counts).tolist())


def _row(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def hazard_auroc(hazard: Tensor, rewards: Tensor, at_risk: Tensor) -> tuple[tuple[float, ...], float]:
    """AUROC of the probability of success (B, T) among the rollouts at risk in each decision, and their mean weighted by the
    number of successes; NaN where a decision has only successes or none."""
    values, weights = [], []
    for t in range(hazard.shape[1]):
        rows = at_risk[:, t]
        values.append(auroc(hazard[rows, t], rewards[rows, t]) if bool(rows.any()) else float("nan"))
        weights.append(float(rewards[rows, t].sum()))
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value == value]
    total = sum(weight for _, weight in known)
    return tuple(values), sum(value * weight for value, weight in known) / total if total else float("nan")


def judge(values: Mapping[str, Any], config: ExamConfig, *, by_updates: bool) -> tuple[str, tuple[str, ...]]:
    """RED vetoes imagination; AMBER leaves it to the trust state; GREEN is a model whose agreement is already shown.

    From keyframes the evidence is that of the updates; a rollout from the first state to the last need not be right.
    """
    red, amber = [], []
    if by_updates:
        low, high = values["update_interval"]
        if high < 0:
            red.append(f"real decisions speak against the proposed updates (upper bound {high:+.3f})")
        if low < 0:
            amber.append(f"proposed updates not shown to be right (lower bound {low:+.3f})")
    else:
        low, high = values["within_start_interval"]
        false_success, limit = values["false_success"], config.red_false_success
        if high < config.red_correlation:
            red.append(f"within-start correlation below {config.red_correlation} (upper bound {high:+.2f})")
        if false_success > limit:
            red.append(f"{false_success:.0%} of real failures imagined as success, limit {limit:.0%}")
        if low < config.green_correlation:
            amber.append(f"within-start correlation not shown to exceed {config.green_correlation} (lower bound {low:+.2f})")
    if max(abs(bound) for bound in values["gap_interval"]) > config.green_gap:
        amber.append(f"gap not shown to be within {config.green_gap}")
    if red:
        return "RED", tuple(red)
    return ("AMBER", tuple(amber)) if amber else ("GREEN", ())


def best_of_group(outcome: Tensor, score: Tensor, group: Tensor) -> tuple[float, tuple[float, float]]:
    """Real success of the member that the model likes best, minus the mean of its group: what choosing by the model would
    gain."""
    gains = []
    for index in range(int(group.max()) + 1):
        rows = group == index
        gains.append(outcome[rows][score[rows].argmax()] - outcome[rows].mean())
    gain = torch.stack(gains)
    return gain.mean().item(), mean_interval(gain)


def group_means(values: Tensor, group: Tensor) -> Tensor:
    """(G,) mean of values (B,) over each group: the independent units of an interval."""
    return torch.stack([values[group == index].mean() for index in range(int(group.max()) + 1)])


def mean_interval(values: Tensor) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of independent values (G,)."""
    interval = paired_bootstrap(values, torch.zeros_like(values), seed=0)
    return interval.low, interval.high


def sign_agreement(outcome: Tensor, score: Tensor, group: Tensor) -> float:
    """Share of pairs inside a group with different real outcomes that the model orders rightly (ties half); NaN without such
    pairs."""
    right, pairs = 0.0, 0
    for index in range(int(group.max()) + 1):
        rows = group == index
        real_difference = outcome[rows][:, None] - outcome[rows]
        order = (score[rows][:, None] - score[rows])[real_difference > 0]
        right += (order > 0).sum().item() + 0.5 * (order == 0).sum().item()
        pairs += order.numel()
    return right / pairs if pairs else float("nan")


def _share(event: Tensor, among: Tensor) -> float:
    return event[among].float().mean().item() if among.any() else float("nan")


@dataclass(frozen=True)
class Fold:
    """What one fold's model says of rollouts that it never saw: replayed hazards (E, B, T), twins, error of one chunk, and
    (keyframes only) what its proposed updates change, (B, T)."""

    real: Rollouts
    hazards: Tensor
    twin: Rollouts
    one_chunk_error: float
    change: Tensor | None = None


def merge(folds: Sequence[Fold], config: ExamConfig) -> tuple[Exam, Fold]:
    """One exam of all folds, and all folds as one: first evidence for the trust state."""
    real = concatenate([fold.real for fold in folds])
    changes = [fold.change for fold in folds if fold.change is not None]
    whole = Fold(
        real,
        torch.cat([fold.hazards for fold in folds], dim=1),
        concatenate([fold.twin for fold in folds]),
        sum(fold.one_chunk_error * len(fold.real) for fold in folds) / len(real),
        torch.cat(changes) if changes else None,
    )
    exam = examine(whole.real, whole.hazards, whole.twin, whole.one_chunk_error, config, change=whole.change)
    return exam, whole
