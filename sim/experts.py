"""Expert episodes from the workers: demonstrations for imitation, and perturbed ones (failures included) for world models.

Shape legend: N control steps, B episodes, T decisions, H control steps of a chunk, P proprioception, O object numbers,
S picture size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sim.perturbations import PERTURBATIONS
from sim.real import STATUS, RealEnvironment
from tasks.task import require_known
from wmrl.types import Rollouts, Start

DEFAULT_MIXTURE = {"none": 0.25, "near_miss": 0.35, "early": 0.1, "late": 0.15, "wrong_cube": 0.15}
"""Shares of the kinds of perturbed demonstrations (tasks with one cube leave the last out)."""


@dataclass(frozen=True)
class Demonstration:
    """One expert episode, one record per control step, taken before the step.

    pixels          camera -> (N, S, S, 3) uint8
    proprio         (N, P); objects (N, O) privileged
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
    jobs = [_job(start, action_noise, seed) for start in starts]
    records = environment.run_jobs("demonstrate", jobs, on_done=on_done)
    return [Demonstration(start=start, **record) for start, record in zip(starts, records, strict=True)]


def perturbed_rollouts(
    environment: RealEnvironment,
    starts: Sequence[Start],
    *,
    seed: int,
    action_noise: float = 0.15,
    mixture: dict[str, float] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Rollouts:
    """Perturbed demonstrations, one per start, every chunk fixed at its beginning like a policy's: real rollouts of the expert.

    action_noise  standard deviation of an offset on the motion numbers, half of its variance shared by the whole chunk
    mixture       perturbation kind -> share, see `sim.perturbations.PERTURBATIONS`; default `DEFAULT_MIXTURE`

    `inputs` holds the observations at chunk boundaries (`pixels/...`, `proprio`, `objects`, `time`), `final` the last one;
    `log_probs` are zero with an empty token mask (no policy acted); `extra["perturbation"]` indexes `PERTURBATIONS`, and
    `extra["planning_seconds"]` is the CPU time of looking ahead, which `seconds` leaves out.
    """
    _check_noise(action_noise)
    shares = _checked_mixture(dict(DEFAULT_MIXTURE if mixture is None else mixture), len(environment.task.scene.cubes))
    generator = np.random.default_rng([seed, len(starts)])
    kinds = [str(k) for k in generator.choice(list(shares), size=len(starts), p=np.array(list(shares.values())))]
    jobs = [_job(start, action_noise, seed) | {"kind": kind} for start, kind in zip(starts, kinds, strict=True)]
    records = environment.run_jobs("demonstrate_chunks", jobs, on_done=on_done)
    count, decisions = len(starts), environment.max_decisions
    observations = {name: _stacked(records, name) for name in records[0] if name not in _OUTCOME}
    return Rollouts(
        starts=tuple(starts),
        member=torch.zeros(count, dtype=torch.long),
        actions=_stacked(records, "actions"),
        inputs={name: values[:, :-1] for name, values in observations.items()},
        final={name: values[:, -1] for name, values in observations.items()},
        log_probs=torch.zeros(count, decisions, 1),
        token_mask=torch.zeros(count, decisions, 1, dtype=torch.bool),
        rewards=_stacked(records, "rewards"),
        mask=_stacked(records, "mask"),
        status=torch.tensor([int(STATUS[record["status"]]) for record in records]),
        seconds=_numbers(records, "seconds"),
        extra={
            "perturbation": torch.tensor([PERTURBATIONS.index(kind) for kind in kinds]),
            "planning_seconds": _numbers(records, "planning_seconds"),
        },
    )


_OUTCOME = frozenset({"actions", "rewards", "mask", "status", "seconds", "planning_seconds"})


def _stacked(records: Sequence[dict[str, Any]], name: str) -> Tensor:
    return torch.from_numpy(np.stack([record[name] for record in records]))


def _numbers(records: Sequence[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([record[name] for record in records], dtype=torch.float32)


def _job(start: Start, action_noise: float, seed: int) -> dict[str, Any]:
    return {
        "seed": start.seed,
        "instruction": start.instruction,
        "action_noise": action_noise,
        "noise_seed": [seed, start.seed],
    }


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
