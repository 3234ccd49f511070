"""Stage 4: reinforcement learning with WMRL (`wmrl-train`): builds the parts and hands them to `wmrl.trainer.Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vla.checkpoint import write_policy
from vla.features import NUM_FEATURES, early_behaviour
from vla.lerobot_dataset import read_facts
from vla.policy import ChunkPolicy
from vla.session import Session, run_in_session
from vla.world_model import base_rollouts, load_model, perturbed_demonstrations, read_exam
from wmrl.buffer import Buffer
from wmrl.checkpoint import load_latest, save_checkpoint
from wmrl.correction import Correction
from wmrl.critic import CrossFittedCritic
from wmrl.keyframes import Keyframes
from wmrl.noise import derive_seed
from wmrl.pairing import Twin
from wmrl.progress import Progress, note, stage
from wmrl.state_files import load_rollouts, load_state
from wmrl.trainer import Parts, Trainer, TrainerConfig
from wmrl.types import Start
from world_model.exam import judge

FIRST_FIT = (
    *("base.safetensors", "perturbed.safetensors", "model.safetensors"),
    *("exam_real.safetensors", "exam_twin.safetensors", "exam_updates.safetensors", "exam.json"),
)
"""What the world model stage leaves; without a world model only the base rollouts are read."""

SHOWN = ("real_success", "imagined_success", "imagined_share", "trust", "dose", "rho_low", "real_episodes")


def run(session: Session) -> None:
    """Train to the last step; continues from the newest whole checkpoint."""
    config = session.config
    latest = load_latest(session.run.checkpoints)
    if latest is not None and latest.step >= config.train.steps:
        return
    with stage(f"train: {config.train.correction.mode}"):
        policy = session.base_policy()
        trainer = build(session, policy)
        if latest is None:
            begin(session, trainer)
        else:
            written = session.ledger.summary()
            trainer.load_state_dict(latest.state)
            session.ledger.keep_later(written)
            note(f"continuing after step {latest.step}")
        session.run.truncate_metrics(trainer.step_index - 1)
        with Progress("train", config.train.steps, start=trainer.step_index) as progress:
            while trainer.step_index < config.train.steps:
                record = trainer.step()
                session.run.log(record)
                save(session, trainer, policy)
                progress.update(trainer.step_index, {name: record[name] for name in SHOWN if record.get(name) is not None})


def build(session: Session, policy: ChunkPolicy) -> Trainer:
    """The parts of a robot run, by plain calls."""
    config = session.config
    check_first_fit(session)
    real = session.encoded(policy)
    at_keyframes = session.imagines_from_keyframes
    correction = Correction(
        config.train.correction, features=early_behaviour, num_features=NUM_FEATURES, judged_by_updates=at_keyframes
    )
    buffer = Buffer()
    model = load_model(session, policy, buffer) if correction.uses_model else None
    parts = Parts(
        environment=real,
        imagination=model,
        policy=policy,
        pairing=Twin(),
        correction=correction,
        starts=StartPool(session),
        buffer=buffer,
        ledger=session.ledger,
        critic=CrossFittedCritic(config.train.critic, num_decisions=real.max_decisions, device=session.device)
        if config.train.critic.enabled
        else None,
        keyframes=Keyframes(buffer, config.seed) if at_keyframes else None,
    )
    settings = TrainerConfig(seed=config.seed, refresh_every=config.train.refresh_every, record=config.recorded)
    return Trainer(settings, parts, config.train.objective)


def check_first_fit(session: Session) -> None:
    """Refuse missing or damaged files of the stage before, while no simulator has started."""
    config, folder = session.config, session.world_model
    modelled = config.train.correction.mode != "real"
    if not modelled and config.base is None and not (folder / FIRST_FIT[0]).exists():
        return  # training itself makes the base rollouts
    names = FIRST_FIT if modelled else FIRST_FIT[:1]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        # the stage leaves a folder with an exam as it is
        again = f"delete {folder / 'exam.json'} and run" if (folder / "exam.json").exists() else "run"
        raise ValueError(
            f"expected {missing[0]} in {folder}, found none; {again} `wmrl-world-model` for {session.base_folder} first"
        )
    states = {name: load_state(folder / name) for name in names if name.endswith(".safetensors")}
    if not modelled:
        return
    try:
        read_exam(session)
    except TypeError as error:
        raise ValueError(f"expected every number of an exam and no other in {folder / 'exam.json'}, got {error}") from error
    if session.imagines_from_keyframes and states["exam_updates.safetensors"]["change"] is None:
        raise ValueError(
            "expected a base run whose exam judged updates from keyframes, its train.imagine_from was starts; "
            "use the same here, or another base"
        )


def begin(session: Session, trainer: Trainer) -> None:
    """What every run starts from: the base rollouts as a first real update, the exam's pairs as first evidence, the exam's
    veto."""
    parts = trainer.parts
    base = base_rollouts(session)
    spent = read_facts(session.dataset).get("spent")
    if spent and not parts.ledger.has("demonstrations"):
        parts.ledger.record_counts("demonstrations", **spent)
    if parts.correction.uses_model:
        parts.buffer.add(perturbed_demonstrations(session))
    trainer.warm_start(base)
    if parts.correction.uses_model:
        seed_evidence(session, parts.correction)
    save(session, trainer, parts.policy)


def seed_evidence(session: Session, correction: Correction) -> None:
    """First evidence before training: what the exam's cross-fitted models said of real rollouts that they never saw; RED is a
    veto. The base run's exam holds both kinds of evidence, and this run's verdict is by the kind that it trains with."""
    real, at_keyframes = load_rollouts(session.world_model / "exam_real.safetensors"), session.imagines_from_keyframes
    exam, change = read_exam(session), load_state(session.world_model / "exam_updates.safetensors")["change"]
    if session.config.base is not None:  # else the stage before has printed it
        for line in exam.lines():
            note(line)
    verdict, _ = judge(asdict(exam), session.config.world_model.exam, by_updates=at_keyframes)
    correction.veto(verdict == "RED")
    if at_keyframes:
        correction.judge_updates(real, change)
    correction.seed_evidence(load_rollouts(session.world_model / "exam_twin.safetensors"), real)


class StartPool:
    """Training starts of a step: a keyed shuffle of a finite pool, so that imagination finds most first observations rendered
    already."""

    def __init__(self, session: Session) -> None:
        self.seed = session.config.seed
        self.pool = session.starts("training", session.config.train.training_starts)

    def __call__(self, step: int, count: int) -> list[Start]:
        """`count` different starts; asking for more only appends. Every goal gets its share of any even count."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, step, "starts"))
        goals = sorted({start.instruction for start in self.pool})
        by_goal = [[start for start in self.pool if start.instruction == goal] for goal in goals]
        shuffled = [[rows[i] for i in torch.randperm(len(rows), generator=generator)] for rows in by_goal]
        mixed = [start for turn in zip(*shuffled, strict=False) for start in turn]
        if count > len(mixed):
            raise ValueError(f"expected at most {len(mixed)} starts a step, asked for {count}; raise train.training_starts")
        return mixed[:count]


def save(session: Session, trainer: Trainer, policy: Any) -> None:
    """The ledger, then a checkpoint, after every step: a kill loses at most the step that was running. A resumed run takes the
    checkpoint's ledger; written the other way round, a kill in between would leave the last step unbooked."""
    task = session.task

    def policy_files(folder: Path) -> None:
        write_policy(folder, policy, fps=task.control_frequency, robot=task.robot.lower())

    session.save_ledger()
    save_checkpoint(session.run.checkpoints, trainer.step_index, policy_files=policy_files, state=trainer.state_dict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
