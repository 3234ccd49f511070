"""The run folder is a contract: one run, one writer, one line per step, and settings that cannot change unnoticed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from wmrl.config import load_resolved
from wmrl.environment_record import describe_environment, differences
from wmrl.files import plain, read_json, read_json_lines, write_text
from wmrl.run_folder import RunFolder, RunFolderError


@dataclass(frozen=True)
class Trainer:
    steps: int = 10
    rate: float = 0.1


@dataclass(frozen=True)
class Config:
    seed: int = 0
    num_workers: int = 2
    trainer: Trainer = Trainer()


RULES = {"may_grow": ["trainer.steps"], "may_change": ["num_workers"]}


def test_config_is_written_resolved_and_reads_back(tmp_path):
    with RunFolder(tmp_path / "run", Config(seed=3)) as run:
        assert run.is_new
        assert load_resolved(run.config_path, Config) == Config(seed=3)


def test_the_same_settings_continue_the_run(tmp_path):
    RunFolder(tmp_path, Config()).close()
    with RunFolder(tmp_path, Config()) as run:
        assert not run.is_new


def test_other_settings_are_refused_by_name(tmp_path):
    RunFolder(tmp_path, Config(), **RULES).close()
    other = Config(seed=1, trainer=Trainer(rate=0.2))
    with pytest.raises(RunFolderError, match="seed: 0 there, 1 asked; trainer.rate: 0.1 there, 0.2 asked"):
        RunFolder(tmp_path, other, **RULES)
    with RunFolder(tmp_path, Config(), **RULES) as run:  # the refusal neither changed the folder nor kept its lock
        assert load_resolved(run.config_path, Config) == Config()


def test_a_folder_older_than_a_key_had_its_default(tmp_path):
    write_text(tmp_path / "config.yaml", "seed: 0\ntrainer: {steps: 10}\n")
    with pytest.raises(RunFolderError, match="other settings: trainer.rate: 0.1 there, 0.2 asked. Use"):
        RunFolder(tmp_path, Config(trainer=Trainer(rate=0.2)))
    RunFolder(tmp_path, Config()).close()


def test_steps_may_grow_but_not_shrink(tmp_path):
    RunFolder(tmp_path, Config(), **RULES).close()
    longer = Config(trainer=Trainer(steps=20), num_workers=4)
    with RunFolder(tmp_path, longer, **RULES) as run:
        assert load_resolved(run.config_path, Config) == longer
    with pytest.raises(RunFolderError, match=r"trainer.steps: 20 there, 10 asked \(may only grow\)"):
        RunFolder(tmp_path, replace(longer, trainer=Trainer(steps=10)), **RULES)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match="thesis.tex"):
        RunFolder(tmp_path, Config())


def test_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path):
    # The kernel's lock belongs to the open file: a second opening meets it in this process just as in another one.
    with RunFolder(tmp_path, Config()):
        with pytest.raises(RunFolderError, match=f"is in use by process {os.getpid()}"):
            RunFolder(tmp_path, Config())
    RunFolder(tmp_path, Config()).close()


def test_metrics_are_a_line_per_step_and_tensorboard_events(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.log({"step": 0, "real": {"success": np.float32(0.5)}, "bias": float("nan"), "trust": "COLD", "n": torch.tensor(3)})
    assert run.metrics() == [{"step": 0, "real": {"success": 0.5}, "bias": None, "trust": "COLD", "n": 3}]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1


def test_resuming_at_a_checkpoint_logs_no_step_twice(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        for step in range(5):
            run.log({"step": step, "value": 0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "va')  # killed while writing
    with RunFolder(tmp_path, Config()) as run:
        run.truncate_metrics(2)
        run.log({"step": 3, "value": 1})
        assert [(record["step"], record["value"]) for record in run.metrics()] == [(0, 0), (1, 0), (2, 0), (3, 1)]


def test_a_line_cut_by_a_kill_does_not_merge_with_the_next(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        write_text(run.metrics_path, '{"step": 0}\n{"st')
        run.log({"step": 1})
    assert [record["step"] for record in run.metrics()] == [0, 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_json_lines(tmp_path / "m.jsonl")


def test_episodes_and_summaries_lie_where_the_contract_says(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        run.write_episodes("base_greedy", [{"success_at_end": True}, {"success_at_end": False}], {"episodes": 2})
        run.write_ledger({"real_decisions": 7})
        run.write_summary({"task": "lift", "interval": (0.1, 0.9)})
        with pytest.raises(ValueError, match="plain name"):
            run.evaluation("../elsewhere")
    assert len((tmp_path / "eval" / "base_greedy" / "episodes.jsonl").read_text().splitlines()) == 2
    assert read_json(tmp_path / "ledger.json") == {"real_decisions": 7}
    assert read_json(tmp_path / "summary.json") == {"task": "lift", "interval": [0.1, 0.9]}


def test_environment_is_recorded_once_and_a_changed_one_is_named(tmp_path):
    with RunFolder(tmp_path, Config()) as run:
        assert run.write_environment("abc") == []
        assert run.write_environment("abc") == []
        changed = run.write_environment("xyz")
    assert changed == ["the golden trajectory was abc, is xyz: the physics differ"]
    record = json.loads((tmp_path / "env.json").read_text())
    assert record["golden_hash"] == "abc" and record["resumed_with"][0]["golden_hash"] == "xyz"
    assert record["versions"]["torch"] == torch.__version__.split("+")[0]


def test_other_versions_are_named():
    now = describe_environment()
    before = {**now, "versions": {**now["versions"], "mujoco": "3.0.0"}}
    assert differences(before, now) == [f"mujoco was 3.0.0, is {now['versions']['mujoco']}"]


def test_another_device_is_named():
    before, now = describe_environment(), describe_environment(device="cuda")
    assert differences(before, now) == ["the device was cpu, is cuda: the last bits differ"]
    assert differences({name: value for name, value in before.items() if name != "device"}, before) == []


def test_json_refuses_what_it_cannot_say():
    assert plain({"a": (1, np.int64(2), Path("x")), 3: torch.ones(2)}) == {"a": [1, 2, "x"], "3": [1.0, 1.0]}
    with pytest.raises(TypeError, match="got object"):
        plain({"a": object()})


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "new \ud800")
    assert (tmp_path / "a.json").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
