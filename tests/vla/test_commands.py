"""Bad input to the console commands: one clear sentence and a non-zero status, before any simulator starts."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import sim.opengl
import sim.workers
from tests.vla.conftest import make_demonstrations
from vla.checkpoint import write_policy
from vla.config import TrainConfig
from vla.lerobot_dataset import write_dataset
from vla.policy import ChunkPolicy
from vla.train import FIRST_FIT
from wmrl.correction import Correction, CorrectionConfig
from wmrl.state_files import save_state
from world_model.exam import Exam

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("demo", "collect", "sft", "world-model", "train", "eval", "report")
SMALL = ("size=smoke", "threads=1")

BAD_SETTINGS = {  # settings, with a space between them -> the sentence
    "task=lift_cub": "expected a task .*, got 'lift_cub': did you mean 'lift_cube'",
    "policy.encoder.cameras=[agentview,wirst]": r"expected cameras out of \['agentview', 'wrist'\] .*, got \['wirst'\]",
    "train.correction.mode=auot": "one of real, model, ppi, fusion, auto, got 'auot', did you mean auto",
    "train.correction.group_size=1": "expected .*group_size of at least 2, .*; got 1",
    "train.correction.group_size=0": "expected .*group_size of at least 2, .*; got 0",
    "train.correction.real_groups=0": "expected .*, got .*0",
    "train.critic.learning_rate=0": "expected critic.learning_rate above 0, .*, got 0.0",
    "train.critic.learning_rate=nan": "train.critic.learning_rate: expected a number, got nan",
    "train.correction.max_dose=0": "expected train.correction.max_dose >= 1 .*got 0; .*gate=shut .* mode=real",
    "train.correction.mode=model train.correction.dose=0": "expected train.correction.dose >= 1 .*, got 0; .* mode=real",
    "policy.chunk=65": "expected a chunk of 1 to 40 control steps.*got 65",
    "train.critic.inputs=[gaol,proprio]": "expected a critic input out of .*, got 'gaol': did you mean 'goal'",
    "train.steps=0": "expected steps >= 1, got 0",
    "train.imagine_from=middle": "expected train.imagine_from to be keyframes or starts, got 'middle'",
    "train.training_starts=1": "expected train.training_starts >= 2 .*, got 1",
    "train.training_starts=10001": "expected train.training_starts <= 10000 .*, got 10001",
    "train.training_starts=11 train.imagine_from=starts": "expected train.training_starts >= 12 .*, got 11",
    "train.training_starts=5 train.correction.real_groups=5 train.correction.imagined_groups=5": (
        r"expected train.training_starts >= 6 \(a step asks for 5, 2 goals in turn\), got 5"
    ),
    "world_model.latent.privileged=[gaol]": "expected a world_model.latent.privileged entry .*'gaol': did you mean 'goal'",
    "world_model.latent.min_steps=0": "expected min_steps >= 1, got 0",
    "world_model.latent.learning_rate=0": "expected learning_rate above 0, got 0.0",
    "world_model.exam.updates=0": "expected world_model.exam.updates >= 1 .*, got 0",
    "world_model.base_groups=3": "expected world_model.base_groups >= 4 .*, got 3",
    "world_model.base_groups=1001": "expected world_model.base_groups <= 1000 .*, got 1001",
    "world_model.perturbed=0": "expected world_model.perturbed >= 1 .*, got 0",
    "world_model.perturbed=4001": "expected world_model.perturbed <= 4000 .*, got 4001",
    "decoder.learning_rate=0": "expected decoder.learning_rate above 0, got 0.0",
    "simulator.timeout_seconds=0": "expected simulator.timeout_seconds above 0, got 0.0",
    "policy.action_size=6": "expected policy.action_size=7, .*, got 6; leave it out",
    "policy.language=nowhere": "expected .* a folder with config.json, .* as language encoder, got 'nowhere'",
    "policy.encoder.language_size=100": "expected policy.encoder.language_size=384 .*, got 100; set it to 384",
    "imitate.shift_pixels=-1": "expected shift_pixels >= 0, got -1",
    "imitate.steps=0": "expected at least 1 step .* got steps=0",
    "collect.demonstrations=1": r"expected collect.demonstrations >= 2 \(one for each goal\), got 1",
    "collect.demonstrations=2001": "expected collect.demonstrations <= 2000 .* for demonstrations.*, got 2001",
    "evaluate.episodes=0": "expected evaluate.episodes of 1 to 1200 .*, got 0",
    "evaluate.episodes=1201": r"expected evaluate.episodes of 1 to 1200 \(the test starts that exist\), got 1201",
    "evaluate.split=validation evaluate.episodes=401": "expected evaluate.episodes of 1 to 400 .*, got 401",
    "evaluate.swap_episodes=-1": "expected evaluate.swap_episodes of 0 to 1200 .*, got -1",
    "evaluate.videos=-1": "expected evaluate.videos of 0 to 400 .*, got -1",
    "evaluate.split=train": "expected evaluate.split validation or test, got 'train'",
    "train.stesp=3": "unknown key train.stesp, did you mean train.steps",
    "+train.stesp=3": "unknown key train.stesp, did you mean train.steps",
    "sise=smoke": "unknown key sise",
    "robot=Sawyer": "unknown key robot",
    "seed=50": "expected seed of 0 to 49 .*, got 50",
    "device=cdua": "expected device cpu, cuda, cuda:N or auto, got 'cdua', did you mean cuda",
    "autocast=bf16": "expected autocast off or bfloat16, got 'bf16', did you mean bfloat16",
    "name=a/b": "expected a run name without slashes, .*, got 'a/b'",
    "name=..": r"expected a run name without slashes, not . or .., got '\.\.'",
    "name=.": r"expected a run name without slashes, not . or .., got '\.'",
}


@pytest.fixture(autouse=True)
def no_simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starting a worker fails the test; torch keeps its number of threads."""

    def start(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a simulator was started")

    monkeypatch.setattr(sim.workers.Worker, "__init__", start)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Shell:
    """Runs console commands in this process, in a runs folder of its own."""

    def __init__(self, runs: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.runs, self.run, self.capture = runs, runs / "demo", capture

    def refusal(self, command: str, *words: str) -> str:
        """The one sentence of a command that must fail."""
        (script,) = entry_points(group="console_scripts", name=f"wmrl-{command}")
        status = script.load()([*SMALL, f"runs={self.runs}", *words])
        lines = [line for line in self.capture.readouterr().err.splitlines() if line and not line.startswith("== ")]
        assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), (status, lines)
        return lines[0].removeprefix("error: ")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "runs", capsys)


@pytest.mark.parametrize("word", BAD_SETTINGS)
def test_a_setting_that_cannot_be_used_is_refused_before_a_folder_is_made(shell: Shell, word: str) -> None:
    assert re.search(BAD_SETTINGS[word], shell.refusal("demo", *word.split()))
    assert not shell.runs.exists()


@pytest.mark.parametrize("without", [{"gate": "shut"}, {"mode": "real"}])
def test_a_dose_of_nought_is_fine_where_nothing_is_to_be_imagined(without: dict[str, str]) -> None:
    config = TrainConfig(correction=CorrectionConfig(max_dose=0, dose=0, **without))  # type: ignore[arg-type]
    assert Correction(config.correction, judged_by_updates=True).dose() == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_cuda_where_there_is_none_is_refused_before_a_folder_is_made(
    shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = shell.refusal(command, "device=cuda")
    assert sentence == "expected a CUDA device for device=cuda, got 0 that PyTorch can use; set device=cpu or auto"
    assert not shell.runs.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_misspelt_key(shell: Shell, command: str) -> None:
    assert shell.refusal(command, "+sead=1") == "unknown key sead, did you mean seed?"


def test_what_an_earlier_stage_should_have_made_is_asked_for_by_its_command(shell: Shell) -> None:
    assert re.search("expected a LeRobot dataset at .*; record one with `wmrl-collect`", shell.refusal("sft"))
    for command in ("world-model", "train", "eval"):
        assert re.search("expected an imitation policy in .*; run `wmrl-sft` first", shell.refusal(command)), command
    sentence = shell.refusal("train", "name=arm", f"base={shell.runs / 'nowhere'}")
    assert re.search("expected a run folder with config.yaml as base, found none at .*nowhere", sentence)


def test_a_run_folder_with_other_settings_is_refused_by_key(shell: Shell) -> None:
    shell.refusal("sft")
    sentence = shell.refusal("sft", "seed=1", "train.steps=1")
    assert "seed: 0 there, 1 asked" in sentence and "train.steps: 2 there, 1 asked (may only grow)" in sentence


def test_a_dataset_that_does_not_fit_the_policy_is_refused_by_feature(shell: Shell) -> None:
    write_dataset(shell.run / "dataset", make_demonstrations((3,)), fps=20, robot="panda", names={}, facts={})
    assert "expected an empty folder or a run with its config.yaml" in shell.refusal("sft")
    (shell.run / "dataset").rename(shell.runs / "dataset")
    shell.refusal("sft")
    (shell.runs / "dataset").rename(shell.run / "dataset")
    assert "image_size: the policy expects 64, the dataset has 32" in shell.refusal("sft")


@pytest.fixture
def imitated(shell: Shell, small_policy: ChunkPolicy) -> Path:
    """The base policy of a run folder after imitation."""
    shell.refusal("train")
    checkpoints = shell.run / "imitation" / "checkpoints"
    (checkpoints / "000006" / "pretrained_model").mkdir(parents=True)
    (checkpoints / "last").symlink_to("000006")
    write_policy(checkpoints / "000006" / "pretrained_model", small_policy, fps=20, robot="panda")
    return checkpoints / "000006" / "pretrained_model"


def cut(path: Path) -> None:
    """What a full disk leaves of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_base_policy_cut_in_half_is_refused_by_file(shell: Shell, imitated: Path) -> None:
    cut(imitated / "model.safetensors")
    assert re.search("expected whole weights in .*model.safetensors, the file is cut off or damaged", shell.refusal("train"))


def test_training_asks_for_every_file_of_the_first_fit(shell: Shell, imitated: Path) -> None:
    folder = shell.run / "world_model"
    for name in FIRST_FIT:
        sentence = shell.refusal("train")
        assert sentence == f"expected {name} in {folder}, found none; run `wmrl-world-model` for {shell.run} first"
        save_state(folder / name, {"change": None})
    (folder / "model.safetensors").unlink()
    sentence = shell.refusal("train")
    assert f"found none; delete {folder / 'exam.json'} and run `wmrl-world-model` for {shell.run} first" in sentence


def test_training_refuses_a_damaged_first_fit_by_file(shell: Shell, imitated: Path) -> None:
    folder = shell.run / "world_model"
    for name in FIRST_FIT:
        save_state(folder / name, {"change": None, "weights": torch.zeros(1000)})
    assert re.search("expected JSON in .*exam.json, got a broken file", shell.refusal("train"))
    (folder / "exam.json").write_text('{"verdict": "GREEN"}')
    assert re.search("expected every number of an exam .*exam.json, got .*missing", shell.refusal("train"))
    (folder / "exam.json").write_text(json.dumps({field.name: 0 for field in dataclasses.fields(Exam)}))
    assert "expected a base run whose exam judged updates from keyframes" in shell.refusal("train")
    for name in reversed(FIRST_FIT[:-1]):
        cut(folder / name)
        assert re.search(f"expected a whole file at .*{name}, it is damaged", shell.refusal("train"))


@pytest.mark.parametrize(("wanted", "named"), [("", "libegl1 .* or .*libosmesa6"), ("osmesa", "libosmesa6")])
def test_without_opengl_the_packages_are_named(shell: Shell, monkeypatch: pytest.MonkeyPatch, wanted: str, named: str) -> None:
    monkeypatch.setenv("MUJOCO_GL", wanted)
    monkeypatch.setattr(sim.opengl, "egl_works", lambda: False)
    monkeypatch.setattr(sim.opengl, "osmesa_works", lambda: False)
    for command in ("collect", "demo"):
        assert re.search(f"expected headless OpenGL through .*, got none .*{named}", shell.refusal(command)), command


def test_importing_the_commands_does_not_import_mujoco() -> None:
    """MuJoCo reads MUJOCO_GL when it is imported, so nothing may import it before that is set."""
    code = "import sys, vla.demo; print(sorted({'mujoco', 'robosuite', 'lerobot'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
