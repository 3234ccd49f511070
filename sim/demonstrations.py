"""Records of the scripted expert: step by step for imitation, and in committed chunks, failures included, for world models.

Shape legend: N control steps, B episodes, T decisions, H control steps of a chunk, P proprioception, O object numbers, S picture size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.environment import ACTION_NAMES, RobotTask
from sim.experts import PERTURBATIONS, LiftExpert, draw_perturbation
from tasks.task import require_known

if TYPE_CHECKING:
    from sim.real import RealEnvironment
    from wmrl.types import Start

DEFAULT_MIXTURE = {"none": 0.25, "near_miss": 0.35, "early": 0.1, "late": 0.15, "wrong_cube": 0.15}
"""Shares of the kinds of perturbed demonstrations (tasks with one cube leave the last out)."""


@dataclass(frozen=True)
class Demonstration:
    """One expert episode, one record per control step, taken before the step.

    pixels          camera -> (N, S, S, 3) uint8
    proprio         (N, P); objects (N, O)
    expert_actions  (N, 7) what the expert commands in that state: the label for imitation
    actions         (N, 7) what was executed: the command plus noise
    success         whether the goal was reached; seconds: CPU time
    """

    start: Start
    pixels: dict[str, np.ndarray]
    proprio: np.ndarray
    objects: np.ndarray
    expert_actions: np.ndarray
    actions: np.ndarray
    success: bool
    seconds: float


@dataclass(frozen=True)
class ChunkedDemonstrations:
    """Episodes laid out like policy rollouts: T + 1 observations at chunk boundaries, T chunks that were fixed before execution.

    pixels    camera -> (B, T+1, S, S, 3) uint8; proprio (B, T+1, P); objects (B, T+1, O); time (B, T+1, 1)
              (after the end of an episode the last observation is repeated)
    actions   (B, T, H, 7), zero after the end; rewards (B, T): 1 at the decision in which the goal was reached; mask (B, T) decision taken
    status    B of success, time_limit, unstable; kinds: B perturbation kinds; seconds (B,) CPU time of the execution
    """

    starts: tuple[Start, ...]
    pixels: dict[str, np.ndarray]
    proprio: np.ndarray
    objects: np.ndarray
    time: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    mask: np.ndarray
    status: tuple[str, ...]
    kinds: tuple[str, ...]
    seconds: np.ndarray


def collect_demonstrations(
    environment: RealEnvironment,
    starts: Sequence[Start],
    *,
    action_noise: float,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Demonstration]:
    """One expert demonstration per start, in order, in parallel over the workers; reproducible from starts and seed.

    action_noise  standard deviation of Gaussian noise on the six motion numbers of the executed action
    on_done       called after each (progress bars)
    """
    _check_noise(action_noise)
    jobs = [
        {"seed": start.seed, "instruction": start.instruction, "action_noise": action_noise, "noise_seed": [seed, start.seed]}
        for start in starts
    ]
    records = environment.run_jobs("demonstrate", jobs, on_done=on_done)
    return [Demonstration(start=start, **record) for start, record in zip(starts, records, strict=True)]


def collect_chunked_demonstrations(
    environment: RealEnvironment,
    starts: Sequence[Start],
    *,
    action_noise: float,
    seed: int,
    mixture: dict[str, float] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> ChunkedDemonstrations:
    """Perturbed demonstrations, one per start, every chunk committed at its beginning.

    action_noise  standard deviation of an offset on the motion numbers, drawn once per chunk (half) and per control step (half)
    mixture       perturbation kind -> share, see `sim.experts.PERTURBATIONS`
    """
    _check_noise(action_noise)
    shares = _checked_mixture(dict(DEFAULT_MIXTURE if mixture is None else mixture), len(environment.task.scene.cubes))
    generator = np.random.default_rng([seed, len(starts)])
    kinds = generator.choice(list(shares), size=len(starts), p=np.array(list(shares.values())))
    jobs = [
        {
            "seed": start.seed,
            "instruction": start.instruction,
            "action_noise": action_noise,
            "noise_seed": [seed, start.seed],
            "kind": str(kind),
        }
        for start, kind in zip(starts, kinds, strict=True)
    ]
    records = environment.run_jobs("demonstrate_chunks", jobs, on_done=on_done)
    stacked = {name: np.stack([record[name] for record in records]) for name in ("proprio", "objects", "time", "actions")}
    return ChunkedDemonstrations(
        starts=tuple(starts),
        pixels={camera: np.stack([r["pixels"][camera] for r in records]) for camera in environment.task.cameras},
        rewards=np.stack([r["rewards"] for r in records]),
        mask=np.stack([r["mask"] for r in records]),
        status=tuple(r["status"] for r in records),
        kinds=tuple(str(kind) for kind in kinds),
        seconds=np.array([r["seconds"] for r in records]),
        **stacked,
    )


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
    while environment.control_steps < environment.spec_task.horizon:
        label = expert.act()
        action = _noisy(label, action_noise, generator)
        records.append((observation, label, action))
        status = environment.control_step(action)
        success = status == "success"
        if status != "running":
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

    Each chunk is what the expert would do from here without noise (found by letting it act, then taking the steps back), plus an offset;
    it is then executed open loop like a policy's chunk.
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
        "pixels": {c: np.stack([o["pixels"][c] for o in observations]) for c in environment.spec_task.cameras},
        **{name: np.stack([o[name] for o in observations]) for name in ("proprio", "objects", "time")},
        "actions": actions,
        "rewards": rewards,
        "mask": mask,
        "status": info["status"],
        "seconds": time.process_time() - begun - planning,
    }


def plan_chunk(environment: RobotTask, expert: LiftExpert) -> np.ndarray:
    """(H, 7) what the expert would do over one chunk. The simulation is put back; the expert remembers the plan as carried out."""
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


def _check_noise(noise: float) -> None:
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"expected action noise of 0 to 1, got {noise}")


def _checked_mixture(mixture: dict[str, float], num_cubes: int) -> dict[str, float]:
    """Shares that sum to one, known kinds only, `wrong_cube` only where there is another cube."""
    for kind, share in mixture.items():
        require_known("perturbation", kind, PERTURBATIONS)
        if share < 0:
            raise ValueError(f"expected shares of at least 0, got {share} for {kind!r}")
    if num_cubes == 1:
        mixture.pop("wrong_cube", None)
    total = sum(mixture.values())
    if total <= 0:
        raise ValueError(f"expected at least one perturbation with a share above 0, got {mixture}")
    return {kind: share / total for kind, share in mixture.items()}
