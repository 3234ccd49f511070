"""Stage 2: imitation, end to end on every demonstration of the run (`wmrl-sft`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from vla.checkpoint import write_policy
from vla.config import RunConfig
from vla.imitation import Imitation
from vla.lerobot_dataset import read_dataset
from vla.policy import ChunkPolicy
from vla.session import Session, run_in_session, sized
from wmrl.checkpoint import load_latest, save_checkpoint
from wmrl.noise import derive_seed
from wmrl.progress import Progress, stage

SAVE_EVERY = 100
"""Gradient steps between checkpoints: about fifteen seconds."""


def run(session: Session) -> None:
    """Train to the last step; continues from the newest checkpoint of the stage."""
    config = session.config
    if config.base is not None:
        session.base_policy()
        return
    latest = load_latest(session.imitation)
    if latest is not None and latest.step >= config.imitate.steps:
        return
    with stage("imitate: end-to-end behaviour cloning"), session.ledger.phase("imitate"):
        imitation = build(config, session)
        if latest is not None:
            imitation.load_state_dict(latest.state)
        with Progress("imitate", config.imitate.steps, start=imitation.step_number) as progress:

            def on_step(step: int, losses: dict[str, float]) -> None:
                progress.update(step, losses)
                if step % SAVE_EVERY == 0 or step == config.imitate.steps:
                    save(session, imitation)

            imitation.run(on_step)
    session.save_ledger()


def build(config: RunConfig, session: Session) -> Imitation:
    """Policy in the shapes of the dataset, with seeded weights."""
    data = read_dataset(session.dataset)
    shaped = sized(config, data.proprio.shape[1], data.objects.shape[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "policy weights"))
        policy = ChunkPolicy(shaped.policy).to(session.device)
    seed = derive_seed(config.seed, "imitation") % 2**31
    return Imitation(policy, data, config.imitate, seed=seed, precision=config.autocast)


def save(session: Session, imitation: Imitation) -> None:
    """A checkpoint in LeRobot's layout."""
    task = session.task
    save_checkpoint(
        session.imitation,
        imitation.step_number,
        policy_files=lambda folder: write_policy(
            folder, imitation.policy, fps=task.control_frequency, robot=task.robot.lower()
        ),
        state=imitation.state_dict(),
        keep=1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
