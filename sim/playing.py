"""The expert at play inside a worker process: single-step records for imitation, committed chunks for world models.

Shape legend: N control steps, T decisions, H control steps of a chunk. Imports no torch, so that workers stay small.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.environment import ACTION_NAMES, NUMBERS, RobotTask
from sim.lifting import LiftExpert
from sim.perturbations import draw_perturbation


def demonstrate(
    environment: RobotTask, seed: int, instruction: str, *, action_noise: float, noise_seed: Sequence[int]
) -> dict[str, Any]:
    """Inside a worker: one episode of the expert, a record per control step."""
    begun = time.process_time()
    generator = np.random.default_rng([*noise_seed, 1])
    observation, _ = environment.reset(seed=seed, options={"instruction": instruction})
    expert = LiftExpert(environment.simulation, environment.goal)
    simulation, records = environment.simulation, []
    success = False
    while environment.control_steps < environment.spec_task.demonstration_horizon:
        label = expert.act()
        action = _noisy(label, action_noise, generator)
        records.append((observation, label, action))
        status = environment.control_step(action)
        success = status == "success"
        if status in ("success", "unstable"):
            break
        simulation.update_pose()
        observation = environment.observe()
    cameras = environment.spec_task.cameras
    return {
        "pixels": {camera: np.stack([o["pixels"][camera] for o, _, _ in records]) for camera in cameras},
        "proprio": np.stack([o["proprio"] for o, _, _ in records]),
        "objects": np.stack([o["objects"] for o, _, _ in records]),
        "expert_actions": np.stack([label for _, label, _ in records]).astype(np.float32),
        "actions": np.stack([action for _, _, action in records]).astype(np.float32),
        "success": success,
        "seconds": time.process_time() - begun,
    }


def demonstrate_chunks(
    environment: RobotTask, seed: int, instruction: str, *, action_noise: float, noise_seed: Sequence[int], kind: str
) -> dict[str, Any]:
    """Inside a worker: one perturbed episode in committed chunks.

    Each chunk is what the expert would do from here without noise (found by letting it act, then taking the steps back), plus
    an offset; it is then executed open loop like a policy's chunk. `seconds` (CPU) are without those of looking ahead.
    """
    generator = np.random.default_rng([*noise_seed, 2])
    begun = time.process_time()
    observation, info = environment.reset(seed=seed, options={"instruction": instruction})
    expert = LiftExpert(environment.simulation, environment.goal, draw_perturbation(kind, generator))
    decisions = environment.spec_task.num_decisions(environment.chunk)
    shape = (decisions, environment.chunk, len(ACTION_NAMES))
    actions, rewards, mask = np.zeros(shape, np.float32), np.zeros(decisions, np.float32), np.zeros(decisions, np.float32)
    observations, planning = [observation], 0.0
    for decision in range(decisions):
        if info["status"] != "running":
            observations.append(observations[-1])
            continue
        before = time.process_time()
        plan = plan_chunk(environment, expert)
        planning += time.process_time() - before
        actions[decision] = _offset_chunk(plan, action_noise, generator)
        observation, rewards[decision], _, _, info = environment.step(actions[decision])
        mask[decision] = 1.0
        observations.append(observation)
    return {
        **{f"pixels/{c}": np.stack([o["pixels"][c] for o in observations]) for c in environment.spec_task.cameras},
        **{name: np.stack([o[name] for o in observations]) for name in NUMBERS},
        "actions": actions,
        "rewards": rewards,
        "mask": mask,
        "status": info["status"],
        "seconds": time.process_time() - begun - planning,
        "planning_seconds": planning,
    }


def plan_chunk(environment: RobotTask, expert: LiftExpert) -> np.ndarray:
    """(H, 7) what the expert would do over one chunk. The simulation is put back; the expert remembers it as carried out."""
    simulation, before = environment.simulation, environment.simulation.state()
    plan = np.empty((environment.chunk, len(ACTION_NAMES)))
    for step in range(environment.chunk):
        simulation.update_pose()
        plan[step] = expert.act()
        simulation.control_step(plan[step])
    simulation.set_state(before)
    return plan


def _offset_chunk(plan: np.ndarray, noise: float, generator: np.random.Generator) -> np.ndarray:
    """The plan plus noise of that standard deviation, half of its variance shared by the whole chunk; the gripper stays."""
    share = np.sqrt(0.5)
    offset = share * generator.standard_normal((1, 6)) + share * generator.standard_normal((len(plan), 6))
    return np.concatenate([np.clip(plan[:, :6] + noise * offset, -1.0, 1.0), plan[:, 6:]], axis=1)


def _noisy(label: np.ndarray, noise: float, generator: np.random.Generator) -> np.ndarray:
    """The command plus Gaussian noise on its six motion numbers; the gripper stays."""
    motion = label[:6] + noise * generator.standard_normal(6)
    return np.concatenate([np.clip(motion, -1.0, 1.0), label[6:]])
