"""kill -9 at random moments loses at most the step in progress, and the resumed run equals the uninterrupted one.

The test starts this file as a program. That process imports torch once and forks a trainer for every kill: each fork is a
process of its own that knows nothing but the run folder.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wmrl.buffer import Buffer
from wmrl.checkpoint import load_latest, save_checkpoint
from wmrl.correction import Correction, CorrectionConfig
from wmrl.ledger import Ledger
from wmrl.objective import ObjectiveConfig
from wmrl.pairing import Pairing, Replay, Twin
from wmrl.run_folder import RunFolder
from wmrl.state_codec import state_hash
from wmrl.toy import BanditWorld, ChainWorld
from wmrl.trainer import Parts, Trainer, TrainerConfig

WORLDS = ("bandit", "chain")
KILLS = {"bandit": 5, "chain": 20}
STEPS = {"bandit": 12, "chain": 40}


@dataclass(frozen=True)
class ToyRun:
    """The settings of the tiny run."""

    world: str
    steps: int


def make_trainer(config: ToyRun, run: RunFolder) -> Trainer:
    """A trainer of the toy in mode auto that logs into the run folder."""
    world: BanditWorld | ChainWorld = BanditWorld(width=32) if config.world == "bandit" else ChainWorld(width=32)
    pairing: Pairing = Replay() if config.world == "bandit" else Twin()
    correction = CorrectionConfig(mode="auto", group_size=4, real_groups=3, imagined_groups=6, max_dose=2)
    parts = Parts(
        environment=world.environment(),
        imagination=world.imagination(),
        policy=world.policy(),
        pairing=pairing,
        correction=Correction(correction, features=world.features, num_features=world.num_features),
        starts=world.starts,
        buffer=Buffer(),
        ledger=Ledger(),
    )
    return Trainer(TrainerConfig(refresh_every=2), parts, ObjectiveConfig(learning_rate=0.05), on_step=run.log)


def train(folder: Path, config: ToyRun) -> None:
    """Begin or continue the run until it is done, with a checkpoint after every step."""
    with RunFolder(folder, config, may_grow=["steps"]) as run:
        trainer = make_trainer(config, run)
        found = load_latest(folder)
        if found is not None:
            trainer.load_state_dict(found.state)
        run.truncate_metrics(trainer.step_index - 1)
        while trainer.step_index < config.steps:
            trainer.step()
            weights = dict(trainer.parts.policy.state_dict())
            save_checkpoint(
                folder,
                trainer.step_index,
                policy_files=partial(write_weights, weights),
                state=trainer.state_dict(),
            )


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors")


def fingerprint(folder: Path, config: ToyRun) -> str:
    """Hash of everything the run left, but for the seconds it took."""
    found = load_latest(folder)
    assert found is not None and found.step == config.steps
    ledger = {key: value for key, value in found.state["ledger"].items() if key != "seconds"}
    with RunFolder(folder, config) as run:
        metrics = [{key: value for key, value in record.items() if key != "seconds"} for record in run.metrics()]
    assert [record["step"] for record in metrics] == list(range(config.steps))
    return state_hash(
        {"state": {**found.state, "ledger": ledger}, "metrics": metrics, "policy": list(weights_of(found.pretrained))}
    )


def weights_of(pretrained: Path) -> bytes:
    return (pretrained / "model.safetensors").read_bytes()


def in_a_process(work: Any, *arguments: Any) -> int:
    """Process id of a fork that does `work` and ends."""
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 the fork must end here, whatever happened
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def kill_at_random_moments(folder: Path, config: ToyRun, seconds_per_step: float) -> int:
    """Start and kill the run again and again; returns how often a kill struck before the end of the run."""
    moments, struck, before = random.Random(0), 0, 0
    for _ in range(KILLS[config.world]):
        child = in_a_process(train, folder, config)
        reach = min(4.0, (config.steps - before) / 3)  # short runs near the end, so that every kill strikes a run that works
        time.sleep(moments.uniform(0.0, reach) * seconds_per_step)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        struck += os.WIFSIGNALED(status)
        found = load_latest(folder)
        logged = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0
        step = found.step if found else 0
        assert before <= step, "a kill lost a finished step"
        assert logged - step in (0, 1), f"{logged} steps logged, {step} saved"
        before = step
    return struck


def main(folder: Path) -> None:
    """Both toys: one run in peace, one with kills; then compare."""
    torch.set_num_threads(1)
    for slow_import in ("torch.utils.tensorboard", "torch._dynamo"):  # else each fork would spend its life on importing them
        importlib.import_module(slow_import)
    for world in WORLDS:
        config = ToyRun(world, STEPS[world])
        began = time.monotonic()
        assert os.waitpid(in_a_process(train, folder / f"{world}-peace", config), 0)[1] == 0
        seconds_per_step = (time.monotonic() - began) / config.steps
        struck = kill_at_random_moments(folder / f"{world}-killed", config, seconds_per_step)
        assert os.waitpid(in_a_process(train, folder / f"{world}-killed", config), 0)[1] == 0
        equal = fingerprint(folder / f"{world}-peace", config) == fingerprint(folder / f"{world}-killed", config)
        print(world, struck, equal, flush=True)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_killed_at_random_moments_equals_the_uninterrupted_one(outcome, world):
    struck, equal = outcome[world]
    assert equal == "True"
    assert int(struck) == KILLS[world]


def test_resuming_with_more_steps_ends_at_the_new_number_and_equals_the_longer_run(tmp_path):
    train(tmp_path / "resumed", ToyRun("bandit", 3))
    train(tmp_path / "resumed", ToyRun("bandit", 5))
    train(tmp_path / "at once", ToyRun("bandit", 5))
    longer = ToyRun("bandit", 5)
    assert fingerprint(tmp_path / "resumed", longer) == fingerprint(tmp_path / "at once", longer)
    with pytest.raises(ValueError, match="steps: 5 there, 4 asked"):
        train(tmp_path / "resumed", ToyRun("bandit", 4))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
