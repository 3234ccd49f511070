"""The report's sections on how training went: learning, imagination and its correction, the exam, what was spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wmrl import plots
from wmrl.report_data import Record, RunData
from wmrl.report_html import absent, figure, grid, number, paragraph, section, table


def learning(data: RunData) -> str:
    """Success of training rollouts and evaluations, against what was paid and against the clock."""
    if not data.metrics:
        return section("Learning", absent("the training steps", "metrics.jsonl"))
    success, rollouts = data.series("real_success"), data.series("real_rollouts")
    seconds = np.cumsum([_total_seconds(record) for record in data.metrics]).tolist()
    decisions = data.series("real_decisions")
    by_decisions = plots.success_curve(
        decisions, success, rollouts, xlabel="real decisions paid for", evaluations=_evaluation_points(data, decisions)
    )
    by_seconds = plots.success_curve(
        seconds, success, rollouts, xlabel="seconds since the first step", evaluations=_evaluation_points(data, [0.0, *seconds])
    )
    empty = sum(float(record.get("groups_without_information") or 0) for record in data.metrics)
    groups = sum(float(record.get("groups") or 0) for record in data.metrics)
    updates = number(_whole(data.metrics[-1].get("optimizer_updates_total")))
    note = (
        f"{empty:.0f} of {groups:.0f} real groups had equal outcomes: without a critic they give no signal. "
        f"{updates} optimiser updates."
    )
    return section(
        "Learning",
        grid(
            figure(by_decisions, "Success against real decisions. Bars: 95 % Wilson intervals."),
            figure(by_seconds, "Success against wall-clock seconds."),
        ),
        paragraph(note, "soft"),
    )


def _evaluation_points(data: RunData, x: Sequence[float | None]) -> list[plots.Point]:
    """Greedy evaluation of base and final policy at the first and last place of the horizontal axis."""
    known = [value for value in x if value is not None]
    points = []
    for name, place in (("base", 0), ("final", -1)):
        result = data.summary.get(name)
        if result and known:
            n = int(result["episodes"])
            points.append(plots.Point(known[place], round(result["success_at_end"] * n), n, f"{name} on test starts, greedy"))
    return points


def _total_seconds(record: Record) -> float:
    return sum(value for value in (record.get("seconds") or {}).values() if value)


def imagination(data: RunData) -> str:
    """How imagination compares with reality, and how far training relied on it."""
    steps = data.series("step")
    if not any(value is not None for value in data.series("imagined_success")):
        return section("Imagination and its correction", absent("imagined rollouts: this run used none", "metrics.jsonl"))
    bias = [data.series(name) for name in ("bias", "bias_low", "bias_high")]
    agreement = [data.series(name) for name in ("rho", "rho_low", "rho_high")]
    states = [str(record.get("trust", "unknown")) for record in data.metrics]
    drawings = [
        figure(
            plots.real_and_imagined(steps, data.series("real_success"), data.series("imagined_success")),
            "Real success beside imagined success of the same policy. The headline numbers are the real ones.",
        ),
        figure(
            plots.lines(steps, {"imagined share": data.series("imagined_share")}, ylabel="share", unit_range=True),
            "Share of the update's |coefficients| that rests on imagined rollouts.",
        ),
        figure(plots.band(steps, *bias, ylabel="bias", label="imagined minus real"), "Bias on pairs, with its 95 % interval."),
        figure(
            plots.trust_and_weights(steps, states, {"kappa": data.series("kappa"), "l": data.series("l")}),
            "Weights of the correction; background: trust state.",
        ),
        figure(
            plots.band(steps, *agreement, ylabel="correlation", label="agreement"),
            "Agreement with reality, with its bounds: of real advantages with what proposed updates change (from keyframes), "
            "or of real and imagined returns within a start (twins).",
        ),
        figure(
            plots.lines(steps, {"dose": data.series("dose")}, ylabel="updates"), "Dose: further imagined updates of each step."
        ),
    ]
    counts = Counter(states)
    spent = ", ".join(f"{state} {count}" for state, count in counts.items())
    alarms = sum(bool(record.get("exploitation_alarm")) for record in data.metrics)
    text = f"Steps by trust state (of {len(states)}): {spent}. Exploitation alarm raised at {alarms} steps."
    return section("Imagination and its correction", grid(*drawings), paragraph(text, "soft"))


def exam(data: RunData) -> str:
    """Every quantity of the world model's exam."""
    values = data.summary.get("exam")
    if not values:
        return section("Exam of the world model", absent("the exam", "summary.json, exam"))
    rows = [[name.replace("_", " "), value] for name, value in _leaves(values)]
    return section("Exam of the world model", table(["quantity", "value"], rows))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}: ") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def spending(data: RunData) -> str:
    """The ledger by purpose and phase, and the seconds of each step."""
    ledger = data.ledger
    if not ledger:
        return section("Ledger", absent("what was spent", "ledger.json"))
    rows = []
    for kind, title in (("real", "real"), ("imagined", "imagined"), ("free", "free (evaluation, videos)")):
        for purpose, entry in (ledger.get(kind) or {}).items():
            rows.append(
                [f"{title}: {purpose}", *(_whole(entry.get(key)) for key in ("decisions", "episodes")), entry.get("seconds")]
            )
    rows.append(["all real", ledger.get("real_decisions"), ledger.get("real_episodes"), None])
    rows.append(["all imagined", ledger.get("imagined_decisions"), ledger.get("imagined_episodes"), None])
    phases = [
        [name, *(entry.get(key) for key in ("wall", "cpu"))] if isinstance(entry, Mapping) else [name, entry, None]
        for name, entry in (ledger.get("seconds") or {}).items()
    ]
    return section(
        "Ledger",
        table(["purpose", "decisions", "episodes", "simulator seconds"], rows),
        "<h3>Seconds by phase</h3>" if phases else "",
        table(["phase", "wall", "CPU of the main process"], phases) if phases else "",
        _step_seconds(data),
    )


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _step_seconds(data: RunData) -> str:
    names = list(dict.fromkeys(name for record in data.metrics for name in (record.get("seconds") or {})))
    if not names:
        return ""
    phases = {name: [(record.get("seconds") or {}).get(name) for record in data.metrics] for name in names}
    return grid(figure(plots.stacked_seconds(data.series("step"), phases), "Seconds of each training step by phase."))
