"""A short fixed trajectory, hashed: equal hashes mean that the simulators and renderers of two machines do the same thing."""

from __future__ import annotations

import hashlib

import numpy as np

from sim.environment import RobotTask
from tasks.task import Task

SEED = 20_261_201
DECISIONS = 3


def golden_hash(environment: RobotTask) -> str:
    """`physics-frame`: 12 hex digits of proprioception and object poses rounded to a micrometre, 12 of the last pictures."""
    generator = np.random.default_rng(SEED)
    physics, frames = hashlib.sha256(), hashlib.sha256()
    environment.reset(seed=SEED)
    for _ in range(DECISIONS):
        observation = environment.step(generator.uniform(-1.0, 1.0, environment.action_space.shape or ()))[0]
        numbers = np.concatenate([observation["proprio"], observation["objects"]]).astype(np.float64)
        physics.update((np.round(numbers, 6) + 0.0).tobytes())  # + 0.0 turns -0.0 into 0.0
    for picture in observation["pixels"].values():
        frames.update(picture.tobytes())
    return f"{physics.hexdigest()[:12]}-{frames.hexdigest()[:12]}"


def golden_trajectory_hash(task: str | Task) -> str:
    """The hash for `env.json`, computed in a worker process of its own."""
    from sim.real import RealEnvironment

    with RealEnvironment(task, width=1, num_workers=1) as environment:
        return str(environment.run_jobs("golden", [{}])[0])
