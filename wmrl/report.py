"""One HTML file about a run, from the contract files of its folder alone; what is missing is said, never hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wmrl import plots
from wmrl.files import read_json, read_json_lines, write_text
from wmrl.report_html import (
    IMAGE_TYPES,
    VIDEO_TYPES,
    absent,
    cards,
    escape,
    figure,
    grid,
    moving_picture,
    number,
    page,
    paragraph,
    section,
    table,
)
from wmrl.statistics import wilson_interval

Record = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """The contract files of a run; {} or [] for those that are not there."""

    folder: Path
    environment: Record
    metrics: list[Record]
    ledger: Record
    summary: Record
    evaluations: dict[str, list[Record]]
    videos: list[Path]

    def series(self, name: str) -> list[float | None]:
        """One metric over the steps, None where it was not logged."""
        return [record.get(name) for record in self.metrics]


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path. Raises ValueError when `folder` is no run folder."""
    folder = Path(folder)
    if not (folder / "config.yaml").exists():
        raise ValueError(f"expected a run folder with a config.yaml, got {folder}")
    data = read_run(folder)
    title = f"{data.summary.get('task', 'run')} · {folder.name}"
    body = [
        *_headline(data, title),
        _comparison(data),
        _learning(data),
        _imagination(data),
        _exam(data),
        _spending(data),
        _evaluations(data),
        _videos(data),
        _origin(data),
    ]
    write_text(folder / "report.html", page(title, body))
    return folder / "report.html"


def read_run(folder: Path) -> RunData:
    """Read all contract files that are there."""

    def json_or_empty(name: str) -> Record:
        return read_json(folder / name) if (folder / name).exists() else {}

    evaluations = {path.parent.name: read_json_lines(path) for path in sorted(folder.glob("eval/*/episodes.jsonl"))}
    kinds = VIDEO_TYPES | IMAGE_TYPES
    return RunData(
        folder=folder,
        environment=json_or_empty("env.json"),
        metrics=read_json_lines(folder / "metrics.jsonl"),
        ledger=json_or_empty("ledger.json"),
        summary=json_or_empty("summary.json"),
        evaluations=evaluations,
        videos=sorted(path for path in folder.glob("videos/**/*") if path.suffix in kinds),
    )


def _headline(data: RunData, title: str) -> list[str]:
    summary, last = data.summary, (data.metrics[-1] if data.metrics else {})
    shown = [(name, *_rate(summary.get(name))) for name in ("base", "final")]
    sampled = [f"{name}_sampled" for name in ("base", "final")]
    shown += [(name.replace("_", ", "), *_rate(summary[name])) for name in sampled if summary.get(name)]
    share = summary.get("imagined_share")
    shown.append(("imagined share of the update", number(share, 2), "share of its |coefficients|, whole run"))
    real = data.ledger.get("real_decisions", last.get("real_decisions"))
    imagined = data.ledger.get("imagined_decisions", last.get("imagined_decisions"))
    shown.append(("decisions paid for", number(real), f"real, beside {number(imagined)} imagined"))
    seed = summary.get("seed")
    subtitle = (
        f"seed {number(seed)}, {len(data.metrics)} training steps"
        if seed is not None
        else f"{len(data.metrics)} training steps"
    )
    return [f"<h1>{escape(title)}</h1>", paragraph(subtitle, "soft"), cards(shown)]


def _rate(result: Mapping[str, Any] | None) -> tuple[str, str]:
    if not result:
        return "–", "not evaluated"
    return (
        f"{result['success_at_end']:.2f}",
        f"success at end, 95 % {number(result.get('interval'), 2)}, n={result.get('episodes')}",
    )


def _comparison(data: RunData) -> str:
    base, final, test = (data.summary.get(key) for key in ("base", "final", "paired_test"))
    if not base or not final:
        return section("Base against final", absent("the evaluation of base and final policy", "summary.json"))
    rows = [
        [name, result["success_at_end"], result.get("success_once"), result.get("interval"), result.get("episodes")]
        for name, result in (("base", base), ("final", final))
    ]
    text = absent("the paired test", "summary.json, paired_test") if not test else paragraph(_verdict(base, final, test))
    head = ["policy", "success at end", "success once", "95 % Wilson interval", "episodes"]
    return section("Base against final", table(head, rows), text)


def _verdict(base: Mapping[str, Any], final: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    """A sentence that claims a difference only where the test shows one."""
    difference = final["success_at_end"] - base["success_at_end"]
    p = test["p_value"]
    numbers = f"difference {difference:+.3f} on {test['n']} paired starts, exact McNemar p = {p:.3g}"
    if p >= 0.05:
        return f"No difference is shown: {numbers}."
    return f"The final policy is {'better' if difference > 0 else 'worse'}: {numbers}. One training seed; seeds differ."


def _learning(data: RunData) -> str:
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
    note = f"{empty:.0f} of {groups:.0f} real groups had equal outcomes and gave no signal; {updates} optimiser updates."
    return section(
        "Learning",
        grid(
            figure(by_decisions, "Success against real decisions. Bars: 95 % Wilson intervals."),
            figure(by_seconds, "Success against wall-clock seconds."),
        ),
        paragraph(note, "soft"),
    )


def _evaluation_points(data: RunData, x: Sequence[float | None]) -> list[plots.Point]:
    """Base and final evaluation at the first and last place of the horizontal axis."""
    known = [value for value in x if value is not None]
    points = []
    for name, place in (("base", 0), ("final", -1)):
        result = data.summary.get(name)
        if result and known:
            n = int(result["episodes"])
            points.append(plots.Point(known[place], round(result["success_at_end"] * n), n, f"{name} on test starts"))
    return points


def _total_seconds(record: Record) -> float:
    return sum(value for value in (record.get("seconds") or {}).values() if value)


def _imagination(data: RunData) -> str:
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


def _exam(data: RunData) -> str:
    exam = data.summary.get("exam")
    if not exam:
        return section("Exam of the world model", absent("the exam", "summary.json, exam"))
    rows = [[name.replace("_", " "), value] for name, value in _leaves(exam)]
    return section("Exam of the world model", table(["quantity", "value"], rows))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}: ") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def _spending(data: RunData) -> str:
    ledger = data.ledger
    if not ledger:
        return section("Ledger", absent("what was spent", "ledger.json"))
    rows = []
    for kind, title in (("real", "real"), ("imagined", "imagined"), ("free", "free (final evaluation)")):
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


def _evaluations(data: RunData) -> str:
    if not data.evaluations:
        return section("All evaluations", absent("episodes", "eval/<name>/episodes.jsonl"))
    rows: list[list[Any]] = []
    statuses: dict[str, Counter[str]] = {}
    for name, episodes in data.evaluations.items():
        if not episodes:
            rows.append([name, None, None, None, 0])
            continue
        at_end = sum(bool(episode.get("success_at_end")) for episode in episodes)
        once = sum(bool(episode.get("success_once", episode.get("success_at_end"))) for episode in episodes)
        rate, low, high = wilson_interval(at_end, len(episodes))
        rows.append([name, rate, once / len(episodes), [low, high], len(episodes)])
        statuses[name] = Counter(str(episode.get("status", "unknown")).lower() for episode in episodes)
    kinds = sorted({status for counts in statuses.values() for status in counts})
    tally = [[name, *(counts.get(kind, 0) for kind in kinds)] for name, counts in statuses.items()]
    return section(
        "All evaluations",
        table(["evaluation", "success at end", "success once", "95 % Wilson interval", "episodes"], rows),
        "<h3>How the episodes ended</h3>" if tally else "",
        table(["evaluation", *kinds], tally) if tally else "",
        _goals(data),
    )


def _goals(data: RunData) -> str:
    rows = []
    for name, episodes in data.evaluations.items():
        by_goal: dict[str, list[bool]] = {}
        for episode in episodes:
            by_goal.setdefault(str(episode.get("instruction", "")), []).append(bool(episode.get("success_at_end")))
        if len(by_goal) > 1:
            for goal, solved in sorted(by_goal.items()):
                rate, low, high = wilson_interval(sum(solved), len(solved))
                rows.append([f"{name}: {goal}", rate, [low, high], len(solved)])
    if not rows:
        return ""
    return "<h3>By instruction</h3>" + table(["evaluation", "success at end", "95 % Wilson interval", "episodes"], rows)


def _videos(data: RunData) -> str:
    if not data.videos:
        return section("Videos", absent("videos", "videos/*.mp4 or *.gif"))
    shown = "".join(moving_picture(path, data.folder) for path in data.videos)
    return section(
        "Videos",
        paragraph("Where two pictures stand side by side: real | imagined.", "soft"),
        f'<div class="videos">{shown}</div>',
    )


def _origin(data: RunData) -> str:
    environment = data.environment
    if not environment:
        return section("Where this comes from", absent("versions and git state", "env.json"))
    git = environment.get("git") or {}
    state = f"{git['commit']}{' (with uncommitted changes)' if git.get('dirty') else ''}" if git else "not a git checkout"
    rows = [["code", state], ["golden trajectory", environment.get("golden_hash") or "not recorded"]]
    rows += [[name, version or "not installed"] for name, version in environment.get("versions", {}).items()]
    rows += [["Python", environment.get("python")], ["platform", environment.get("platform")]]
    resumed = environment.get("resumed_with") or []
    warning = (
        paragraph(f"The run was resumed {len(resumed)} times in another environment, see env.json.", "absent")
        if resumed
        else ""
    )
    return section("Where this comes from", warning, table(["", ""], rows))
