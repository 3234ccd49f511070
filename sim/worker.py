"""What runs inside a worker process: several environments of one task on one shared model, one message at a time.

Started as `python -m sim.worker <file descriptor>`: a fresh interpreter that inherits no OpenGL context, thread or lock, does
not import the user's main script, and ends by itself when its parent is gone. Messages are (command, arguments), replies
("ok", result) or ("error", text).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sim.environment import RobotTask, Stage
from tasks.task import Task


class Rows:
    """The environments of a worker, by row of the batch."""

    def __init__(self, task: Task, chunk: int, image_size: int) -> None:
        self.stage = Stage(task, image_size)
        self._task, self._chunk = task, chunk
        self._rows: dict[int, RobotTask] = {}
        self._frames: dict[int, list[np.ndarray]] = {}

    def warm_up(self) -> None:
        """Load the model, the compiled controller and OpenGL before anything is timed (the very first time they are made)."""
        environment = self.environment()
        environment.reset(seed=0)
        environment.step(np.zeros(environment.action_space.shape or ()))

    def reset(self, starts: dict[int, tuple[int, str]], record: dict[int, tuple[str, int, bool]]) -> dict[int, dict[str, Any]]:
        """Begin rows; starts: row -> (seed, instruction), record: row -> (camera, size, full) of the frames to keep."""
        replies = {}
        for row, (seed, instruction) in starts.items():
            environment = self._rows.setdefault(row, self.environment())
            environment.on_control_step = None
            begun = time.process_time()
            observation, _ = environment.reset(seed=seed, options={"instruction": instruction})
            seconds = time.process_time() - begun
            if row in record:
                self._start_recording(row, environment, *record[row])
            replies[row] = {"observation": observation, "seconds": seconds, "frames": self._frames.pop(row, [])}
        return replies

    def step(self, actions: dict[int, np.ndarray]) -> dict[int, dict[str, Any]]:
        """Execute one chunk in each row."""
        replies = {}
        for row, chunk in actions.items():
            begun = time.process_time()
            observation, reward, _, _, info = self._rows[row].step(chunk)
            seconds = time.process_time() - begun
            replies[row] = {
                "observation": observation,
                "reward": reward,
                "status": info["status"],
                "clipped": info["clipped"],
                "control_steps": info["control_steps"],
                "seconds": seconds,
                "frames": self._frames.pop(row, []),
            }
        return replies

    def environment(self) -> RobotTask:
        """A further environment on the shared model."""
        return RobotTask(self._task, chunk=self._chunk, image_size=self.stage.image_size, stage=self.stage)

    def _start_recording(self, row: int, environment: RobotTask, camera: str, size: int, full: bool) -> None:
        def keep(source: RobotTask) -> None:
            frame = self.stage.video_frame(source.simulation, camera, size, full)
            self._frames.setdefault(row, []).append(frame)

        keep(environment)
        environment.on_control_step = keep


def answer(rows: Rows, command: str, arguments: dict[str, Any]) -> Any:
    """Execute one message."""
    if command == "reset":
        return rows.reset(**arguments)
    if command == "step":
        return rows.step(**arguments)
    if command == "demonstrate":
        from sim.playing import demonstrate

        return demonstrate(rows.environment(), **arguments)
    if command == "demonstrate_chunks":
        from sim.playing import demonstrate_chunks

        return demonstrate_chunks(rows.environment(), **arguments)
    if command == "golden":
        from sim.golden import golden_hash

        return golden_hash(rows.environment())
    if command == "ping":
        return os.getpid()
    raise AssertionError(command)


def serve(connection: Connection) -> None:
    """Answer messages until told to close or until the parent is gone."""
    task, chunk, image_size = connection.recv()
    rows = Rows(task, chunk, image_size)
    rows.warm_up()
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent has closed the pipe, or was killed
            break
        if message is None:
            break
        try:
            reply = ("ok", answer(rows, *message))
        except ValueError as error:  # the caller's mistake; anything else is a crash and ends the process
            reply = ("error", str(error))
        try:
            connection.send(reply)
        except BrokenPipeError:
            break
    rows.stage.close()


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    import mujoco

    # Instabilities are reported by status; MuJoCo would also write a log file into the current folder.
    mujoco.set_mju_user_warning(lambda text: None)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
