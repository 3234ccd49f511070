"""The whole robot run, killed at random moments of every stage, ends like the uninterrupted one; and what a run leaves."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wmrl.checkpoint import load_latest
from wmrl.files import read_json, read_json_lines
from wmrl.state_codec import state_hash

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("size=smoke", "train.correction.gate=open", "train.critic.inputs=[goal,proprio]")
"""The gate forced open: in two tiny steps it might stay shut, and no imagined update would be compared. The critic reads
privileged state, so that what rollouts record beside the policy's inputs is compared too."""
MARKS = (
    "dataset",
    "world_model/base.safetensors",
    "checkpoints/000000",
    "checkpoints/000001",
    "eval/base-greedy/episodes.jsonl",
)
"""Each kill strikes at a random moment of the seconds after one of these has appeared."""


def demo(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vla.demo", f"runs={folder.parent}", f"name={folder.name}", *SETTINGS]
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def finish(folder: Path) -> None:
    status = demo(folder).wait()
    assert status == 0, (folder.parent / f"{folder.name}.log").read_text()[-3000:]


def kill_after(folder: Path, mark: str, seconds: float) -> None:
    """Start or continue the run; end it `seconds` after `mark` is there."""
    process = demo(folder)
    while not (folder / mark).exists():
        assert process.poll() is None, f"the run ended before {mark}"
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"the run ended before the kill after {mark}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of an uninterrupted run and of one that was killed once after each mark."""
    folder, moments = tmp_path_factory.mktemp("runs"), random.Random(0)
    peace, killed = folder / "peace", folder / "killed"
    finish(peace)
    for mark in MARKS:
        kill_after(killed, mark, moments.uniform(0.0, 2.0))
    finish(killed)
    return peace, killed


def without_seconds(value: Any) -> Any:
    """A nested value without the clock: how long something took is the only thing that may differ."""
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key != "seconds"}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def test_the_final_checkpoint_is_the_same(runs: tuple[Path, Path]) -> None:
    states = [load_latest(run) for run in runs]
    assert all(state is not None and state.step == 2 for state in states)
    peace, killed = (without_seconds(state.state) for state in states if state is not None)
    differing = [name for name in peace if state_hash(peace[name]) != state_hash(killed[name])]
    assert differing == []
    first, second = (run / "checkpoints/last/pretrained_model/model.safetensors" for run in runs)
    assert first.read_bytes() == second.read_bytes()


def test_no_step_is_logged_twice_and_the_numbers_are_the_same(runs: tuple[Path, Path]) -> None:
    peace, killed = ([without_seconds(record) for record in read_json_lines(run / "metrics.jsonl")] for run in runs)
    assert [record["step"] for record in killed] == [0, 1] and peace == killed
    assert all(record["optimizer_updates_total"] > 0 and record["imagined_share"] > 0 for record in killed[1:])


def test_evaluations_and_the_ledger_are_the_same(runs: tuple[Path, Path]) -> None:
    names = {"base-greedy", "base-sampled", "base-swapped", "final-greedy", "final-sampled"}
    for run in runs:
        assert {path.name for path in (run / "eval").iterdir()} == names
    for name in names:
        peace, killed = (without_seconds(read_json_lines(run / "eval" / name / "episodes.jsonl")) for run in runs)
        assert peace == killed and len(peace) == (2 if name == "base-swapped" else 4)
    peace, killed = (without_seconds(read_json(run / "ledger.json")) for run in runs)
    assert {name: peace[name] for name in peace if name != "free"} == {name: killed[name] for name in killed if name != "free"}
    assert without_seconds(read_json(runs[0] / "summary.json")) == without_seconds(read_json(runs[1] / "summary.json"))


def test_the_run_folder_keeps_its_contract(runs: tuple[Path, Path]) -> None:
    for run in runs:
        files = ("config.yaml", "env.json", "metrics.jsonl", "ledger.json", "summary.json", "report.html")
        assert all((run / name).is_file() for name in files)
        assert list((run / "tensorboard").glob("events.*"))
        kinds = sorted(path.name.split(" - ")[0] for path in (run / "videos").iterdir())
        assert kinds == ["base", "final after step 2", "real beside imagined"]
        last = run / "checkpoints" / "last"
        assert last.is_symlink() and last.resolve().name == "000002"
        assert {path.name for path in last.iterdir()} == {"pretrained_model", "training_state"}
        assert not list(run.rglob("*.pkl")) and not list(run.rglob("*.pt"))


def test_the_summary_holds_what_was_promised(runs: tuple[Path, Path]) -> None:
    summary = read_json(runs[1] / "summary.json")
    assert summary["task"] == "lift_cube" and summary["seed"] == 0
    for policy in ("base", "final"):
        numbers = summary[policy]
        assert numbers["episodes"] == 4 and len(numbers["interval"]) == 2
        assert numbers["interval"][0] <= numbers["success_at_end"] == numbers["success_once"] <= numbers["interval"][1]
    assert summary["paired_test"]["n"] == 4 and 0 < summary["paired_test"]["p_value"] <= 1
    assert 0 <= summary["imagined_success"] <= 1 and 0 < summary["imagined_share"] <= 1
    assert summary["exam"]["verdict"] in ("GREEN", "AMBER", "RED") and summary["exam"]["rollouts"] == 8
    ledger = summary["ledger"]
    assert ledger["real_episodes"] == 4 + 8 + 4 + 8 and ledger["real_decisions"] > 100 and ledger["imagined_decisions"] > 0
    assert {"collect", "imitate", "base rollouts", "exam", "fit", "imagine", "real", "update"} <= ledger["seconds"].keys()
