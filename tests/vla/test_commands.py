"""Bad input to the console commands: one clear sentence and a non-zero status, before any simulator starts."""

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
from vla.lerobot_dataset import write_dataset
from vla.policy import ChunkPolicy

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("demo", "collect", "sft", "world-model", "train", "eval", "report")
SMALL = ("size=smoke", "threads=1")

BAD_SETTINGS = {
    "task=lift_cub": "expected a task .*, got 'lift_cub': did you mean 'lift_cube'",
    "policy.encoder.cameras=[agentview,wirst]": r"expected cameras out of \['agentview', 'wrist'\] .*, got \['wirst'\]",
    "train.correction.mode=auot": "one of real, model, ppi, fusion, auto, got 'auot', did you mean auto",
    "train.correction.group_size=1": "expected .*group_size of at least 2, .*; got 1",
    "train.correction.group_size=0": "expected .*group_size of at least 2, .*; got 0",
    "train.correction.real_groups=0": "expected .*, got .*0",
    "policy.chunk=65": "expected a chunk of 1 to 40 control steps.*got 65",
    "train.critic.inputs=[gaol,proprio]": "expected a critic input out of .*, got 'gaol': did you mean 'goal'",
    "train.steps=0": "expected steps >= 1, got 0",
    "train.imagine_from=middle": "expected train.imagine_from to be keyframes or starts, got 'middle'",
    "train.training_starts=1": "expected training_starts >= 2 .*, got 1; raise it, or lower correction.imagined_groups",
    "world_model.latent.privileged=[gaol]": "expected a world_model.latent.privileged entry .*'gaol': did you mean 'goal'",
    "world_model.latent.min_steps=0": "expected min_steps >= 1, got 0",
    "imitate.steps=0": "expected at least 1 step .* got steps=0",
    "collect.demonstrations=0": "expected at least 1 demonstration, got 0",
    "evaluate.episodes=0": "expected at least 1 evaluation episode, got 0",
    "evaluate.split=train": "expected evaluate.split validation or test, got 'train'",
    "train.stesp=3": "unknown key train.stesp, did you mean train.steps",
    "+train.stesp=3": "unknown key train.stesp, did you mean train.steps",
    "sise=smoke": "unknown key sise",
    "device=cdua": "expected device cpu, cuda, cuda:N or auto, got 'cdua', did you mean cuda",
    "autocast=bf16": "expected autocast off or bfloat16, got 'bf16', did you mean bfloat16",
    "name=a/b": "expected a run name without slashes, got 'a/b'",
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
    assert re.search(BAD_SETTINGS[word], shell.refusal("demo", word))
    assert not shell.runs.exists()


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


def test_a_base_policy_cut_in_half_is_refused_by_file(shell: Shell, small_policy: ChunkPolicy) -> None:
    shell.refusal("train")
    checkpoints = shell.run / "imitation" / "checkpoints"
    (checkpoints / "000006" / "pretrained_model").mkdir(parents=True)
    (checkpoints / "last").symlink_to("000006")
    write_policy(checkpoints / "000006" / "pretrained_model", small_policy, fps=20, robot="panda")
    weights = checkpoints / "000006" / "pretrained_model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert re.search("expected whole weights in .*model.safetensors, the file is cut off or damaged", shell.refusal("train"))


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
