"""One robot run while it works: its folder, its real world and its ledger, shared by the stages that write into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from sim.golden import golden_trajectory_hash
from sim.opengl import prepare
from sim.real import RealEnvironment
from tasks.starts import check_no_leak, load_manifest, make_starts
from tasks.task import Task, get_task
from vla.checkpoint import read_policy
from vla.config import PURPOSES, STARTS_PER_SEED, RunConfig, room
from vla.encoded import EncodedEnvironment
from vla.language import SentenceEncoder
from vla.policy import ChunkPolicy, PolicyConfig
from wmrl.command import run_command
from wmrl.config import load_resolved
from wmrl.device import find_device
from wmrl.files import read_json
from wmrl.ledger import Ledger
from wmrl.run_folder import RunFolder
from wmrl.types import Rollouts, Start

MAY_CHANGE = ("simulator.workers", "simulator.timeout_seconds", "evaluate.videos", "runs", "device")
"""Settings that cannot alter a result; the device can, in the last bits, so env.json names it and a change is logged."""


class Session:
    """A context manager: opens the run folder (one process at a time), starts the simulator at first use, closes both."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = find_device(config.device)
        self.task: Task = get_task(config.task)
        torch.set_num_threads(config.threads)
        check_language(config.policy)
        if config.base is not None:
            check_base(config, config.base)
        self.run = RunFolder(config.folder, config, may_grow=("train.steps",), may_change=MAY_CHANGE)
        self.ledger = Ledger()
        if self.run.ledger_path.exists():
            self.ledger.load_state_dict(read_json(self.run.ledger_path))

    @cached_property
    def environment(self) -> RealEnvironment:
        """The real world in camera observations. Its first use records in env.json what results depend on."""
        prepare()
        self.run.write_environment(golden_trajectory_hash(self.task), device=str(self.device))
        policy, simulator = self.config.policy, self.config.simulator
        return RealEnvironment(
            self.task,
            chunk=policy.chunk,
            width=simulator.width,
            num_workers=simulator.workers,
            image_size=policy.encoder.image_size,
            timeout_seconds=simulator.timeout_seconds,
        )

    def encoded(self, policy: ChunkPolicy) -> EncodedEnvironment:
        """The real world as the policy's features."""
        return EncodedEnvironment(self.environment, policy)

    @property
    def imagines_from_keyframes(self) -> bool:
        return self.config.train.imagine_from == "keyframes"

    @property
    def base_folder(self) -> Path:
        """The run folder whose demonstrations, base policy, base rollouts and world model are used."""
        return self.config.base if self.config.base is not None else self.run.path

    @property
    def dataset(self) -> Path:
        """The LeRobot dataset of demonstrations."""
        return self.base_folder / "dataset"

    @property
    def imitation(self) -> Path:
        """Checkpoints of the imitation stage."""
        return self.base_folder / "imitation"

    @property
    def world_model(self) -> Path:
        """Base rollouts, the first fit and its exam."""
        return self.base_folder / "world_model"

    def starts(self, purpose: str, count: int, offset: int = 0) -> list[Start]:
        """`count` training starts of this run seed for one purpose, checked against the frozen test and validation starts."""
        most = room(purpose)
        if offset + count > most:
            raise ValueError(
                f"expected at most {most} starts for {purpose} (each purpose has its own), got {offset + count}; use fewer"
            )
        begin = self.config.seed * STARTS_PER_SEED + PURPOSES[purpose] + offset
        starts = make_starts(self.task, "train", count, begin)
        for split in ("validation", "test"):
            check_no_leak(starts, load_manifest(self.task.name, split))
        return starts

    def base_policy(self) -> ChunkPolicy:
        """The imitation policy on this session's device, its encoder frozen."""
        folder = self.imitation / "checkpoints" / "last" / "pretrained_model"
        if not folder.exists():
            raise ValueError(f"expected an imitation policy in {self.imitation}, found none; run `wmrl-sft` first")
        return freeze_encoder(read_policy(folder.resolve(), self.device))

    def book_once(self, purpose: str, rollouts: Rollouts) -> None:
        """Book what is made once a run and then read from its file, also when a kill came between the file and the ledger."""
        if not self.ledger.has(purpose):
            self.ledger.record(purpose, rollouts)
            self.save_ledger()

    def save_ledger(self) -> None:
        """Write ledger.json."""
        self.run.write_ledger(self.ledger.summary())

    def close(self) -> None:
        """Stop the simulator and let others use the folder."""
        if "environment" in self.__dict__:
            self.environment.close()
        self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def run_in_session(run: Callable[[Session], None], arguments: Sequence[str] | None) -> int:
    """A stage as a console command: settings from the command line, the stage in its run folder; returns the exit status."""

    def work(config: RunConfig) -> None:
        with Session(config) as session:
            run(session)

    return run_command(work, "robot", RunConfig, arguments)


def check_language(policy: PolicyConfig) -> None:
    """Refuse a sentence encoder that is not there, or whose vectors have another length than the policy reads."""
    size = read_json(SentenceEncoder(policy.language).folder / "config.json").get("hidden_size")
    if size is not None and size != policy.encoder.language_size:
        raise ValueError(
            f"expected policy.encoder.language_size={size} (hidden_size of policy.language={policy.language}), "
            f"got {policy.encoder.language_size}; set it to {size}"
        )


def check_base(config: RunConfig, base: Path) -> None:
    """Refuse a base run that was made under other settings than this run claims, as far as they shaped what it left."""
    path = base / "config.yaml"
    if not path.is_file():
        raise ValueError(f"expected a run folder with config.yaml as base, found none at {base}; run the first stages there")
    try:
        other = load_resolved(path, RunConfig)
    except ValueError as error:
        raise ValueError(f"expected settings of today in {path}, got others: {error}; make the base run again") from error
    mine, theirs = _shaping(config), _shaping(other)
    for name in mine:
        if theirs[name] != mine[name]:
            raise ValueError(
                f"expected the base run {base} to have the same {name}, it has another; give the same settings as there"
            )


def _shaping(config: RunConfig) -> dict[str, Any]:
    """The settings that shape what a base run leaves to others."""
    names = ("seed", "task", "policy", "collect", "imitate", "world_model")
    rollouts = {
        "train.correction.group_size": config.train.correction.group_size,
        "privileged train.critic.inputs": sorted(config.recorded),
    }
    return {**{name: getattr(config, name) for name in names}, **rollouts}


def freeze_encoder(policy: ChunkPolicy) -> ChunkPolicy:
    """From here on only the head learns: the world model predicts the encoder's output, which must keep its meaning."""
    for parameter in policy.encoder.parameters():
        parameter.requires_grad_(False)
    return policy


def sized(config: RunConfig, proprio_size: int, object_size: int) -> RunConfig:
    """The configuration with the sizes that only the data know."""
    encoder = replace(config.policy.encoder, proprio_size=proprio_size, object_size=object_size)
    return replace(config, policy=replace(config.policy, encoder=encoder))
