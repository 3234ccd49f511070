"""One HTML file about a run, from the contract files of its folder alone; what is missing is said, never hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wmrl.files import write_text
from wmrl.report_data import RunData, read_run
from wmrl.report_html import absent, cards, escape, moving_picture, number, page, paragraph, section, table
from wmrl.report_training import exam, imagination, learning, spending
from wmrl.statistics import wilson_interval

DECODINGS = {"greedy": "", "sampled": "_sampled"}
"""Decoding -> what its names in summary.json end with."""


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
        learning(data),
        imagination(data),
        exam(data),
        spending(data),
        _evaluations(data),
        _videos(data),
        _origin(data),
    ]
    write_text(folder / "report.html", page(title, body))
    return folder / "report.html"


def _headline(data: RunData, title: str) -> list[str]:
    summary, last = data.summary, (data.metrics[-1] if data.metrics else {})
    shown = [
        (f"{policy}, {decoding}", *_rate(summary.get(policy + ending)))
        for decoding, ending in DECODINGS.items()
        for policy in ("base", "final")
    ]
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
    rows, verdicts = [], []
    for decoding, ending in DECODINGS.items():
        names = (f"base{ending}", f"final{ending}", f"paired_test{ending}")
        base, final, test = (data.summary.get(name) for name in names)
        for policy, result in (("base", base), ("final", final)):
            if result:
                shown = [result.get(key) for key in ("success_at_end", "success_once", "interval", "episodes")]
                rows.append([f"{policy}, {decoding}", *shown])
        if base and final and test:
            verdicts.append(paragraph(f"{decoding.capitalize()}: {_verdict(base, final, test)}"))
        else:
            verdicts.append(absent(f"the paired test of base and final policy, {decoding}", f"summary.json, {names[2]}"))
    head = ["policy, decoding", "success at end", "success once", "95 % Wilson interval", "episodes"]
    return section("Base against final", table(head, rows) if rows else "", *verdicts)


def _verdict(base: Mapping[str, Any], final: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    """A sentence that claims a difference only where the test shows one."""
    difference = final["success_at_end"] - base["success_at_end"]
    p = test["p_value"]
    interval = f"95 % bootstrap interval {number(test.get('interval'))}"
    numbers = f"difference {difference:+.3f}, {interval}, on {test['n']} paired starts, exact McNemar p = {p:.3g}"
    if p >= 0.05:
        return f"no difference is shown: {numbers}."
    return f"the final policy is {'better' if difference > 0 else 'worse'}: {numbers}. One training seed; seeds differ."


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
