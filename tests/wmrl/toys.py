"""Trainers on the toy worlds, the comparison of their states, and seeded numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wmrl.buffer import Buffer
from wmrl.collect import collect, expand
from wmrl.correction import Correction, CorrectionConfig
from wmrl.keyframes import Keyframes
from wmrl.ledger import Ledger
from wmrl.objective import ObjectiveConfig
from wmrl.pairing import Replay, Twin
from wmrl.toy import BanditWorld, ChainWorld
from wmrl.trainer import Parts, Trainer, TrainerConfig

QUICK = ObjectiveConfig(learning_rate=0.1, kl=0.0, epochs=1, imagined_epochs=1, minibatches=1, imagined_minibatches=1)


def make_trainer(
    world: BanditWorld | ChainWorld,
    *,
    objective: ObjectiveConfig = QUICK,
    refresh: int = 0,
    at_keyframes: bool = False,
    **changes: Any,
) -> Trainer:
    settings = {"mode": "auto", "group_size": 8, "real_groups": 4, "imagined_groups": 12, "dose": 0, "max_dose": 1, **changes}
    buffer, policy = Buffer(640 if at_keyframes else 64), world.policy()
    if at_keyframes:
        starts, members = expand(world.starts(0, 8), 8)
        buffer.add(collect(world.environment(), policy, starts, members, seed=5))
    imagination = world.imagination(buffer) if isinstance(world, ChainWorld) else world.imagination()
    parts = Parts(
        environment=world.environment(),
        imagination=None if settings["mode"] == "real" else imagination,
        policy=policy,
        pairing=Replay() if isinstance(world, BanditWorld) else Twin(),
        correction=Correction(
            CorrectionConfig(**settings),
            features=world.features,
            num_features=world.num_features,
            judged_by_updates=at_keyframes,
        ),
        starts=world.starts,
        buffer=buffer,
        ledger=Ledger(),
        keyframes=Keyframes(buffer, 0) if at_keyframes else None,
    )
    return Trainer(TrainerConfig(seed=0, refresh_every=refresh), parts, objective)


BANDIT = BanditWorld(num_tasks=4, width=96)
CHAIN = ChainWorld(width=96)


def states_equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(states_equal(first[k], second[k]) for k in first if k != "seconds")
    if isinstance(first, list):
        return len(first) == len(second) and all(states_equal(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second or (first != first and second != second)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
