"""Stage 1: scripted expert demonstrations in the real world, as a LeRobot v3 dataset (`wmrl-collect`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sim.experts import Demonstration, collect_demonstrations
from vla.demonstrations import Demonstrations
from vla.lerobot_dataset import ACTION, OBJECTS, PROPRIO, check_dataset, read_facts, write_dataset
from vla.session import Session, run_in_session
from wmrl.noise import derive_seed
from wmrl.progress import Progress, note, stage


def run(session: Session) -> None:
    """Record the demonstrations; a dataset that is there already is checked and kept."""
    if session.dataset.exists() or session.config.base is not None:
        check_dataset(session.dataset)
        book(session)
        return
    config, task = session.config, session.task
    with stage("collect: scripted demonstrations"):
        with session.ledger.phase("collect"):
            data, spent = record(session)
        for name in data.constant_dimensions():
            note(f"warning: {name} never changes in the demonstrations; it is kept with a floor on its scale")
        facts = {
            "task": task.name,
            "action_noise": config.collect.action_noise,
            "controller": "operational-space deltas",
            "robot": task.robot,
            "spent": spent,
        }
        environment = session.environment
        names = {ACTION: environment.action_names, PROPRIO: environment.proprio_names, OBJECTS: environment.object_names}
        write_dataset(session.dataset, data, fps=task.control_frequency, robot=task.robot.lower(), names=names, facts=facts)
        book(session)
        note(f"{data.num_episodes} demonstrations, {len(data)} control steps, {len(data) / data.num_episodes:.0f} each")


def book(session: Session) -> None:
    """Book what the dataset says that it cost, once: also when a kill came between the dataset and the ledger."""
    spent = read_facts(session.dataset).get("spent")
    if spent and session.config.base is None and not session.ledger.has("demonstrations"):
        session.ledger.record_counts("demonstrations", **spent)
        session.save_ledger()


def record(session: Session) -> tuple[Demonstrations, dict[str, Any]]:
    """Demonstrations of the run's own training starts, goals in turn, and what they cost: decisions are chunks."""
    config = session.config
    starts = session.starts("demonstrations", config.collect.demonstrations)
    with Progress("collect", len(starts), unit="episode") as progress:
        count = iter(range(1, len(starts) + 1))
        episodes = collect_demonstrations(
            session.environment,
            starts,
            action_noise=config.collect.action_noise,
            seed=derive_seed(config.seed, "demonstrations") % 2**32,
            on_done=lambda: progress.update(next(count)),
        )
    failed = sum(not episode.success for episode in episodes)
    if failed:
        note(f"{failed} of {len(episodes)} scripted episodes failed and are left out")
    spent = {
        "decisions": sum(-(-len(episode.actions) // config.policy.chunk) for episode in episodes),
        "episodes": len(episodes),
        "seconds": sum(episode.seconds for episode in episodes),
    }
    return join([episode for episode in episodes if episode.success]), spent


def join(episodes: Sequence[Demonstration]) -> Demonstrations:
    """One table of all control steps; the label is what the expert commanded, not what the noise made of it."""
    lengths = torch.tensor([len(episode.actions) for episode in episodes])
    return Demonstrations(
        frames={
            camera: torch.from_numpy(np.concatenate([episode.pixels[camera] for episode in episodes]))
            for camera in episodes[0].pixels
        },
        proprio=torch.from_numpy(np.concatenate([episode.proprio for episode in episodes])),
        actions=torch.from_numpy(np.concatenate([episode.expert_actions for episode in episodes])).clamp(-1.0, 1.0),
        objects=torch.from_numpy(np.concatenate([episode.objects for episode in episodes])),
        episode=torch.repeat_interleave(torch.arange(len(episodes)), lengths),
        instructions=tuple(episode.start.instruction for episode in episodes),
        seeds=tuple(episode.start.seed for episode in episodes),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
