"""The real world as a `wmrl.types.Environment`: rows of a robot task, simulated in worker processes.

Shape legend: B rows, H control steps of a chunk, P proprioception, O object numbers, S picture size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sim.environment import ACTION_NAMES, NUMBERS, OBJECT, PROPRIOCEPTION, check_actions, check_camera
from sim.workers import Message, WorkerPool
from tasks.task import Task, get_task
from wmrl.types import Observation, Start, Status, Step

STATUS = {
    "running": Status.RUNNING,
    "success": Status.SUCCESS,
    "time_limit": Status.TIME_LIMIT,
    "unstable": Status.UNSTABLE,
}
"""The words that the light worker processes use (they do not import torch, and so not `Status`)."""


class RealEnvironment:
    """Real rollouts, `width` at a time. Row i lives in worker i modulo their number; results do not depend on that number.

    task         name or `Task`
    width        rows at once; num_workers processes share them (started at the first reset; the very first makes the model)
    chunk        control steps of one decision
    image_size   pixels of the square pictures the policy sees
    timeout_seconds  one chunk of all rows of a worker may take this long before the worker counts as hung

    Observation: `pixels/agentview`, `pixels/wrist` uint8 (B, S, S, 3); `proprio` float32 (B, P); `objects` float32 (B, O)
    and `goal` (B, G) privileged; `time` float32 (B, 1) share of the horizon used; `instruction` list of B str.
    """

    imagined = False
    action_names = ACTION_NAMES
    proprio_names = PROPRIOCEPTION
    action_size = len(ACTION_NAMES)
    proprio_size = len(PROPRIOCEPTION)

    def __init__(
        self,
        task: str | Task = "lift_cube",
        *,
        width: int = 16,
        num_workers: int = 2,
        chunk: int = 8,
        image_size: int = 64,
        timeout_seconds: float = 120.0,
    ) -> None:
        self.task = get_task(task) if isinstance(task, str) else task
        self.max_decisions = self.task.num_decisions(chunk)
        for name, value, least in (("width", width, 1), ("num_workers", num_workers, 1), ("image_size", image_size, 8)):
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
        self.width, self.num_workers, self.chunk, self.image_size = width, min(num_workers, width), chunk, image_size
        self.object_names = tuple(f"{cube}_{name}" for cube in self.task.scene.cubes for name in OBJECT)
        self.object_size = len(self.object_names)
        self.clipped_actions = 0
        """Action numbers outside [-1, 1] so far; they were clipped."""
        self._pool = WorkerPool(self.num_workers, (self.task, chunk, image_size), timeout_seconds)
        self._record: dict[int, tuple[str, int, bool]] = {}
        self._frames: dict[int, list[np.ndarray]] = {}
        self._starts: list[Start] = []
        self._history: dict[int, list[np.ndarray]] = {}
        self._observations: list[dict[str, Any]] = []
        self._status: list[Status] = []
        self._control_steps: list[int] = []
        self._reset_seconds: list[float] = []

    def reset(self, starts: Sequence[Start]) -> Observation:
        """Begin at most `width` rollouts. Equal starts give equal first observations, bit for bit."""
        self._check_starts(starts)
        self._starts = list(starts)
        self._history = {row: [] for row in range(len(starts))}
        self._frames = {row: [] for row in self._record if row < len(starts)}
        self._status = [Status.RUNNING] * len(starts)
        self._control_steps = [0] * len(starts)
        replies = self._ask({worker: [self._reset_message(worker)] for worker in self._used_workers()}, replay=False)
        for row in range(len(starts)):
            if replies.get(row) is None:
                raise RuntimeError(f"worker {row % self.num_workers} failed to begin row {row}: see the log")
        self._observations = [replies[row]["observation"] for row in range(len(starts))]
        self._reset_seconds = [replies[row]["seconds"] for row in range(len(starts))]
        for row, frames in self._frames.items():
            frames.extend(replies[row]["frames"])
        return self._observation()

    def step(self, actions: Tensor) -> Step:
        """Execute a chunk (B, H, 7) in every row that still runs; rows that had ended keep status and observation, reward 0.

        `seconds` are CPU seconds of the worker, pictures included, the reset counted with the first decision.
        """
        count = len(self._starts)
        if count == 0:
            raise ValueError("expected reset before step")
        chunks = check_actions(actions.detach().cpu().numpy(), (count, self.chunk, self.action_size))
        running = [row for row in range(count) if self._status[row] == Status.RUNNING]
        messages: dict[int, list[Message]] = {}
        for worker in range(self.num_workers):
            rows = [row for row in running if row % self.num_workers == worker]
            if rows:
                messages[worker] = [("step", {"actions": {row: chunks[row] for row in rows}})]
        replies = self._ask(messages, replay=True)
        reward, seconds = torch.zeros(count), torch.zeros(count)
        for row in running:
            reply = replies.get(row)
            if reply is None:
                self._status[row] = Status.INFRASTRUCTURE
                continue
            begun = 0.0 if self._history[row] else self._reset_seconds[row]
            self._history[row].append(chunks[row])
            self._observations[row] = reply["observation"]
            self._status[row] = STATUS[reply["status"]]
            self._control_steps[row] = reply["control_steps"]
            self.clipped_actions += reply["clipped"]
            reward[row], seconds[row] = reply["reward"], begun + reply["seconds"]
            if row in self._frames:
                self._frames[row].extend(reply["frames"])
        status = torch.tensor([int(s) for s in self._status])
        return Step(self._observation(), reward, status, seconds, (status == int(Status.RUNNING)).float())

    def record_frames(self, rows: Sequence[int], *, size: int = 256, camera: str = "agentview", full: bool = False) -> None:
        """From the next reset on keep a picture of every control step of these rows. full: shadows, all triangles."""
        check_camera(self.task, camera)
        outside = [row for row in rows if not 0 <= row < self.width]
        if outside:
            raise ValueError(f"expected rows of 0 to {self.width - 1}, got {outside}")
        self._record = {row: (camera, size, full) for row in rows}

    def frames(self) -> dict[int, np.ndarray]:
        """Row -> (N, size, size, 3) uint8 recorded since the last reset: the first state, then one per control step."""
        return {row: np.stack(frames) for row, frames in self._frames.items()}

    @property
    def control_steps(self) -> tuple[int, ...]:
        """Control steps that each row has executed since the reset."""
        return tuple(self._control_steps)

    @property
    def num_restarts(self) -> int:
        """Workers that died or hung, and were replaced."""
        return self._pool.num_restarts

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers in use."""
        return tuple(self._pool.pid(worker) for worker in self._used_workers())

    def run_jobs(
        self, command: str, jobs: Sequence[dict[str, Any]], *, on_done: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Run stateless jobs, dealt out to the workers in turn, results in the order of the jobs. Ends running rollouts."""
        self._starts = []
        order = {worker: list(range(worker, len(jobs), self.num_workers)) for worker in range(self.num_workers)}
        messages: dict[int, list[Message]] = {w: [(command, jobs[i]) for i in mine] for w, mine in order.items()}
        results: dict[int, Any] = {}
        for worker, replies in self._pool.exchange(messages, on_reply=on_done).items():
            if replies is None:
                raise RuntimeError(f"worker {worker} failed repeatedly at {command!r}: see the log")
            results.update(zip(order[worker], replies, strict=True))
        return [results[i] for i in range(len(jobs))]

    def close(self) -> None:
        """End the workers. A later reset starts new ones."""
        self._starts = []
        self._pool.close()

    def __enter__(self) -> RealEnvironment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_starts(self, starts: Sequence[Start]) -> None:
        if not 1 <= len(starts) <= self.width:
            raise ValueError(f"expected 1 to {self.width} starts (the width), got {len(starts)}: play more in waves")
        for start in starts:
            if start.task != self.task.name:
                raise ValueError(f"expected starts of task {self.task.name!r}, got one of {start.task!r}")
            if start.variant or start.snapshot:
                raise ValueError(f"expected a start without variant and snapshot (not built yet), got {start}")
            self.task.goal_of(start.instruction)

    def _used_workers(self) -> list[int]:
        return list(range(min(self.num_workers, len(self._starts))))

    def _rows_of(self, worker: int) -> list[int]:
        return list(range(worker, len(self._starts), self.num_workers))

    def _reset_message(self, worker: int) -> Message:
        rows = self._rows_of(worker)
        starts = {row: (self._starts[row].seed, self._starts[row].instruction) for row in rows}
        return "reset", {"starts": starts, "record": {row: self._record[row] for row in rows if row in self._frames}}

    def _replay(self, worker: int) -> list[Message]:
        """What brings a fresh worker to the state before the lost decision: its starts, and every chunk executed since."""
        rows = self._rows_of(worker)
        messages = [self._reset_message(worker)]
        for decision in range(max(len(self._history[row]) for row in rows)):
            chunks = {row: self._history[row][decision] for row in rows if decision < len(self._history[row])}
            messages.append(("step", {"actions": chunks}))
        return messages

    def _ask(self, messages: dict[int, list[Message]], *, replay: bool) -> dict[int, Any]:
        """Row -> reply, from one message per worker; rows of a worker that failed for good are missing."""
        answers = self._pool.exchange(messages, rebuild=self._replay if replay else lambda worker: [])
        merged: dict[int, Any] = {}
        for replies in answers.values():
            if replies is not None:
                merged.update(replies[0])
        return merged

    def _observation(self) -> Observation:
        """The batch of the rows' observations, in fresh tensors."""
        rows = self._observations
        batch: Observation = {
            f"pixels/{camera}": torch.from_numpy(np.stack([row["pixels"][camera] for row in rows]))
            for camera in self.task.cameras
        }
        for name in NUMBERS:
            batch[name] = torch.from_numpy(np.stack([row[name] for row in rows]))
        batch["instruction"] = [start.instruction for start in self._starts]
        return batch
