"""The report shows what the contract files say, with every n, and says what is missing."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import imageio.v3 as imageio
import numpy as np
import pytest
from matplotlib.figure import Figure

from wmrl import plots
from wmrl.progress import Progress, duration, note, rate, stage
from wmrl.report import write_report
from wmrl.report_html import number
from wmrl.run_folder import RunFolder


@dataclass(frozen=True)
class Config:
    seed: int = 0


def record(step: int) -> dict:
    """A step's metrics as the trainer writes them."""
    return {
        "step": step,
        "real_success": 0.4 + 0.02 * step,
        "real_rollouts": 32.0,
        "imagined_success": 0.5 if step else None,
        "imagined_share": 0.3,
        "bias": 0.1,
        "bias_low": 0.05,
        "bias_high": 0.15,
        "kappa": 0.4,
        "l": 1.25,
        "rho": 0.35,
        "rho_low": 0.1,
        "rho_high": 0.5,
        "trust": "FUSE" if step > 2 else "COLD",
        "exploitation_alarm": step == 5,
        "dose": 2.0,
        "groups": 4.0,
        "groups_without_information": 1.0,
        "optimizer_updates_total": 10 * step,
        "seconds": {"imagine": 1.0, "real": 4.0, "update": 0.5},
        "real_decisions": 1000 + 250 * step,
        "imagined_decisions": 5000 * step,
    }


def episodes(solved: int, n: int) -> list[dict]:
    instructions = ["lift the red cube", "lift the green cube"]
    return [
        {
            "success_at_end": i < solved,
            "success_once": i < solved,
            "status": "success" if i < solved else "time_limit",
            "instruction": instructions[i % 2],
        }
        for i in range(n)
    ]


SUMMARY = {
    "task": "lift_cube",
    "seed": 3,
    "base": {"success_at_end": 0.4, "success_once": 0.45, "episodes": 200, "interval": [0.33, 0.47]},
    "final": {"success_at_end": 0.6, "success_once": 0.6, "episodes": 200, "interval": [0.53, 0.67]},
    "paired_test": {"p_value": 0.0004, "n": 200, "interval": [0.1, 0.3]},
    "base_sampled": {"success_at_end": 0.3, "success_once": 0.3, "episodes": 200, "interval": [0.24, 0.37]},
    "final_sampled": {"success_at_end": 0.35, "success_once": 0.35, "episodes": 200, "interval": [0.29, 0.42]},
    "paired_test_sampled": {"p_value": 0.25, "n": 200, "interval": [-0.03, 0.13]},
    "imagined_share": 0.3,
    "exam": {"verdict": "AMBER", "gap_interval": [-0.1, 0.2], "extra": {"group_size": 8}},
}
LEDGER = {
    "real_decisions": 2250,
    "imagined_decisions": 25_000,
    "real_episodes": 300,
    "imagined_episodes": 3200,
    "seconds": {"imagine": {"wall": 12.5, "cpu": 12.0}},
    "real": {"anchors": {"decisions": 1250, "episodes": 160, "seconds": 40.0}},
    "imagined": {},
    "free": {},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run that has everything."""
    return write_report(full_run(tmp_path_factory.mktemp("runs") / "demo"))


def full_run(folder: Path) -> Path:
    """A run folder that has everything."""
    with RunFolder(folder, Config()) as run:
        run.write_environment("abc123")
        for step in range(6):
            run.log(record(step))
        run.write_ledger(LEDGER)
        run.write_summary(SUMMARY)
        run.write_episodes("base_greedy", episodes(80, 200))
        run.write_episodes("final_greedy", episodes(120, 200))
        run.videos.mkdir()
        frames = np.zeros((4, 32, 32, 3), np.uint8)
        imageio.imwrite(run.videos / "real_final_0.gif", frames)
    return folder


class Checker(HTMLParser):
    """Every tag that opens also closes; collects what is loaded from elsewhere."""

    VOID = {"meta", "img", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def check(path: Path) -> Checker:
    checker = Checker()
    checker.feed(path.read_text())
    assert checker.open == []
    return checker


def text_of(path: Path) -> str:
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", path.read_text(), flags=re.S))


def test_a_full_run_has_every_section_and_nothing_missing(report):
    found = check(report)
    assert found.headings == [
        "Base against final",
        "Learning",
        "Imagination and its correction",
        "Exam of the world model",
        "Ledger",
        "All evaluations",
        "Videos",
        "Where this comes from",
    ]
    assert "Not there" not in text_of(report)


def test_the_report_is_one_file_that_loads_nothing(report):
    sources = check(report).sources
    assert len(sources) == 10 and all(source.startswith("data:") for source in sources)
    drawings = [source.split(",")[1] for source in sources if source.startswith("data:image/svg")]
    assert len(drawings) == 9
    for drawing in drawings:
        ElementTree.fromstring(base64.b64decode(drawing))


def as_numbers(figure: Figure) -> str:
    """A drawing as what it shows: lines and areas by label, and the limits of its vertical axis."""
    (axes,) = figure.axes
    shown = {str(line.get_label()): np.asarray(line.get_ydata(), dtype=float).tolist() for line in axes.lines}
    areas = {str(area.get_label()): area.get_datalim(axes.transData).intervaly.tolist() for area in axes.collections}
    return json.dumps({"lines": shown, "areas": areas, "ylabel": axes.get_ylabel(), "limits": axes.get_ylim()})


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """Caption up to its first mark -> what the drawing above it shows."""
    monkeypatch.setattr(plots, "_svg", as_numbers)
    page = write_report(full_run(tmp_path / "run")).read_text()
    found = re.findall(r'svg\+xml;base64,([^"]+)"><figcaption>([^<]+)', page)
    return {re.split("[.,:;]", html.unescape(caption))[0]: json.loads(base64.b64decode(data)) for data, caption in found}


def test_every_drawing_shows_what_its_caption_says(drawn):
    real, imagined = [0.4, 0.42, 0.44, 0.46, 0.48, 0.5], [float("nan"), 0.5, 0.5, 0.5, 0.5, 0.5]
    expected: dict[str, dict[str, list[float]]] = {
        "Real success beside imagined success of the same policy": {"real": real, "imagined": imagined},
        "Share of the update's |coefficients| that rests on imagined rollouts": {"imagined share": [0.3] * 6},
        "Bias on pairs": {"imagined minus real": [0.1] * 6},
        "Weights of the correction": {"kappa": [0.4] * 6, "l": [1.25] * 6},
        "Agreement with reality": {"agreement": [0.35] * 6},
        "Dose": {"dose": [2.0] * 6},
    }
    curves = ["Success against real decisions", "Success against wall-clock seconds"]
    assert list(drawn) == [*curves, *expected, "Seconds of each training step by phase"]
    for caption, series in expected.items():
        lines = {label: values for label, values in drawn[caption]["lines"].items() if not label.startswith("_")}
        assert lines == {label: pytest.approx(values, nan_ok=True) for label, values in series.items()}, caption
    for curve in curves:
        assert drawn[curve]["lines"]["training rollouts, 32 a step (sampled)"] == pytest.approx(real)
    assert [*drawn["Bias on pairs"]["areas"].values()] == [pytest.approx([0.05, 0.15])]
    assert [*drawn["Agreement with reality"]["areas"].values()] == [pytest.approx([0.1, 0.5])]
    assert list(drawn["Seconds of each training step by phase"]["areas"]) == ["imagine", "real", "update"]


def test_a_weight_above_one_stays_inside_its_drawing(drawn):
    assert drawn["Weights of the correction"]["limits"][1] > 1.25


def test_numbers_stand_with_their_n_and_interval(report):
    text = text_of(report)
    better = "the final policy is better: difference +0.200, 95 % bootstrap interval [0.100, 0.300], on 200 paired starts"
    assert f"Greedy: {better}, exact McNemar p = 0.0004." in text
    undecided = "no difference is shown: difference +0.050, 95 % bootstrap interval [-0.030, 0.130], on 200 paired starts"
    assert f"Sampled: {undecided}, exact McNemar p = 0.25." in text
    assert re.search(r"base, greedy\s+0\.400\s+0\.450\s+\[0\.330, 0\.470\]\s+200\s+final, greedy\s+0\.600", text)
    assert re.search(r"base, sampled\s+0\.300\s+0\.300\s+\[0\.240, 0\.370\]\s+200\s+final, sampled\s+0\.350", text)
    assert "success at end, 95 % [0.53, 0.67], n=200" in text
    assert re.search(r"final_greedy\s+0\.600\s+0\.600\s+\[0\.531, 0\.665\]\s+200", text)
    assert re.search(r"base_greedy: lift the red cube\s+0\.400\s+\[0\.309, 0\.498\]\s+100", text)
    assert "2,250" in text and "real, beside 25,000 imagined" in text
    assert "Steps by trust state (of 6): COLD 3, FUSE 3. Exploitation alarm raised at 1 steps." in text
    assert "6 of 24 real groups had equal outcomes: without a critic they give no signal. 50 optimiser updates." in text


def test_no_winner_is_named_unless_the_test_supports_it(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.write_summary({**SUMMARY, "paired_test": {"p_value": 0.06, "n": 200}})
    text = text_of(write_report(tmp_path))
    assert "Greedy: no difference is shown: difference +0.200" in text and "better" not in text


def test_a_decoding_that_was_not_evaluated_is_said(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.write_summary({name: value for name, value in SUMMARY.items() if not name.endswith("_sampled")})
    text = text_of(write_report(tmp_path))
    assert "Not there: the paired test of base and final policy, sampled (summary.json, paired_test_sampled)." in text
    assert "Greedy: the final policy is better" in text


def test_missing_pieces_are_said(tmp_path):
    RunFolder(tmp_path, Config()).close()
    text = text_of(write_report(tmp_path))
    missing = ("summary.json", "metrics.jsonl", "ledger.json", "eval/&lt;name&gt;/episodes.jsonl", "videos/", "env.json")
    for name in missing:
        assert re.search(rf"Not there: [^.]*\({re.escape(name)}", text), name


def test_a_real_only_run_says_that_it_imagined_nothing(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.log({"step": 0, "real_success": 0.5, "real_rollouts": 8, "seconds": {"real": 1.0}, "real_decisions": 10})
    assert "this run used none" in text_of(write_report(tmp_path))


def test_no_run_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected a run folder"):
        write_report(tmp_path)


def test_text_from_files_cannot_become_markup(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.write_summary({**SUMMARY, "task": "<script>alert(1)</script>"})
    assert "<script>" not in write_report(tmp_path).read_text()


def test_numbers_are_written_for_people():
    assert [number(v) for v in (None, float("nan"), True, 12345, 0.12345, 2000.0, [0.1, 0.2], "x")] == [
        "–",
        "–",
        "yes",
        "12,345",
        "0.123",
        "2,000",
        "[0.100, 0.200]",
        "x",
    ]


def test_progress_prints_few_plain_lines_without_a_terminal():
    stream = io.StringIO()
    with Progress("collect", 100, unit="episode", stream=stream) as progress:
        for done in range(1, 101):
            progress.update(done, {"success": 0.5})
    assert stream.getvalue().splitlines() == ["collect: 100/100 episodes in 0 s, 0 s left, success 0.5"]


def test_progress_counts_only_new_work_for_the_time_left():
    stream = io.StringIO()
    progress = Progress("train", 20, start=10, stream=stream, every=0.0)
    progress._began -= 60.0  # a minute ago
    progress.update(15)
    assert stream.getvalue() == "train: 15/20 steps in 1 min 00 s, 1 min 00 s left\n"


def test_progress_advances_by_one():
    stream = io.StringIO()
    with Progress("exam", 2, unit="fold", stream=stream, every=0.0) as progress:
        progress.advance()
        progress.advance()
    assert [line[:14] for line in stream.getvalue().splitlines()] == ["exam: 1/2 fold", "exam: 2/2 fold"]


def test_stage_durations_and_rates():
    stream = io.StringIO()
    with stage("imitate", stream=stream):
        note("24 demonstrations", stream=stream)
    assert stream.getvalue() == "\n== imitate ==\n24 demonstrations\n   done in 0 s\n"
    assert [duration(s) for s in (7.4, 185, 7800)] == ["7 s", "3 min 05 s", "2 h 10 min"]
    assert rate(108, 200) == "0.54 [0.47, 0.61] (n=200)" and rate(0, 0) == "none of 0"
