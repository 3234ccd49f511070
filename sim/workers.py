"""Long-lived simulator processes, each with rows of its own. One that dies or hangs is replaced and its work done again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from sim.cache import cache_folder
from sim.opengl import choose_platform

logger = logging.getLogger(__name__)

Message = tuple[str, dict[str, Any]]
MAXIMUM_RESTARTS = 2
"""Replacements of one worker within one exchange; after that its rows are given up."""
SHUTDOWN_SECONDS = 5.0


def worker_environment(platform: str) -> dict[str, str]:
    """Environment variables of a worker process."""
    environment = os.environ | {
        "MUJOCO_GL": platform,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", str(cache_folder() / "numba")),
        "OMP_NUM_THREADS": "1",
        "LP_NUM_THREADS": "0",  # Mesa's rasteriser in the calling thread: 2.2 instead of 4 ms of CPU per frame
    }
    # Bytecode in our own cache where Python may not leave it beside the source: a worker starts twice as fast with it.
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(cache_folder() / "bytecode"))
    return environment


class Worker:
    """One process and the pipe to it."""

    def __init__(self, name: str, setup: tuple[Any, ...], platform: str) -> None:
        self.name = name
        self.connection, theirs = Pipe()
        environment = worker_environment(platform)
        # -P: a folder named `sim` where the user happens to stand must not be taken for ours.
        command = [sys.executable, "-P", "-m", "sim.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        self.connection.send(setup)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def close(self) -> None:
        """Ask the process to end, and make sure that it does."""
        try:
            self.connection.send(None)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.connection.close()
        try:
            self.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def reap(self) -> int:
        """Exit code of a process that has closed its pipe."""
        self.connection.close()
        try:
            return self.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode

    def kill(self) -> None:
        """End the process at once."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.connection.close()


@dataclass
class _Conversation:
    """What one worker still has to be told, and what it has answered. The first `silent` messages only rebuild its state."""

    messages: list[Message]
    silent: int = 0
    restarts: int = 0
    deadline: float = 0.0
    replies: list[Any] = field(default_factory=list)


class WorkerPool:
    """A fixed number of workers, started at the first use.

    setup    (task, chunk, image size) for every worker
    timeout  seconds one message may take before its worker counts as hung; the first message of a worker may take longer
             (it may have to make the model)
    """

    STARTUP_SECONDS = 300.0

    def __init__(self, num_workers: int, setup: tuple[Any, ...], timeout: float) -> None:
        self.num_workers = num_workers
        self.timeout = timeout
        self.num_restarts = 0
        self._setup = setup
        self._platform = choose_platform()
        self._workers: dict[int, Worker] = {}
        self._warm: set[int] = set()

    def pid(self, worker: int) -> int:
        """Process id of a worker that has been used."""
        return self._workers[worker].pid

    def exchange(
        self,
        messages: Mapping[int, Sequence[Message]],
        *,
        rebuild: Callable[[int], list[Message]] = lambda worker: [],
        on_reply: Callable[[], None] = lambda: None,
    ) -> dict[int, list[Any] | None]:
        """Tell each worker its messages, one after another, all workers at once; the replies in order.

        rebuild(worker) gives the messages that bring a fresh worker to the state before this exchange. None for a worker that
        failed `MAXIMUM_RESTARTS` + 1 times. ValueError when a worker refused a message as the caller's mistake.
        """
        talks = {worker: _Conversation(list(queue)) for worker, queue in messages.items() if queue}
        for worker, talk in talks.items():
            self._tell(worker, talk, rebuild)
        failed: set[int] = set()
        refusals: list[str] = []
        while active := {w: t for w, t in talks.items() if t.messages and w not in failed}:
            connections: dict[Connection, int] = {self._workers[w].connection: w for w in active}
            now = time.monotonic()
            ready = wait(list(connections), timeout=max(0.0, min(t.deadline for t in active.values()) - now))
            late = [w for w, t in active.items() if t.deadline <= time.monotonic()]
            for worker in {connections[c] for c in ready} | set(late):  # type: ignore[index]
                talk = talks[worker]
                reply = self._hear(worker)
                if reply is None:
                    if not self._replace(worker, talk, rebuild, late=worker in late):
                        failed.add(worker)
                    continue
                self._warm.add(worker)
                if reply[0] == "error":
                    refusals.append(reply[1])
                    talk.messages.clear()
                    continue
                talk.messages.pop(0)
                if talk.silent:
                    talk.silent -= 1
                else:
                    talk.replies.append(reply[1])
                    on_reply()
                if talk.messages:
                    self._tell(worker, talk, rebuild)
        if refusals:
            raise ValueError(refusals[0])
        return {worker: None if worker in failed else talk.replies for worker, talk in talks.items()}

    def close(self) -> None:
        """End all processes. The pool may be used again; it then starts new ones."""
        workers = list(self._workers.values())
        self._workers.clear()
        self._warm.clear()
        for worker in workers:
            worker.close()

    def _tell(self, worker: int, talk: _Conversation, rebuild: Callable[[int], list[Message]]) -> None:
        if worker not in self._workers:
            self._workers[worker] = Worker(f"simulator {worker}", self._setup, self._platform)
        talk.deadline = time.monotonic() + (self.timeout if worker in self._warm else max(self.STARTUP_SECONDS, self.timeout))
        try:
            self._workers[worker].connection.send(talk.messages[0])
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died while idle: hearing from it will tell, and replace it

    def _hear(self, worker: int) -> Any | None:
        """The reply that is there, or None when the worker is dead or late."""
        connection = self._workers[worker].connection
        try:
            return connection.recv() if connection.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def _replace(self, worker: int, talk: _Conversation, rebuild: Callable[[int], list[Message]], *, late: bool) -> bool:
        """Start the worker anew and let it repeat what it had done; False when it has failed too often."""
        old = self._workers.pop(worker)
        if late:
            fate = f"gave no answer for {self.timeout:g} s"
            old.kill()
        else:  # its pipe is closed; the exit code may take a moment
            fate = f"died with exit code {old.reap()}"
        self._warm.discard(worker)
        self.num_restarts += 1
        talk.restarts += 1
        if talk.restarts > MAXIMUM_RESTARTS:
            logger.error("worker %s (pid %d) %s for the %d. time: giving up its rows", old.name, old.pid, fate, talk.restarts)
            return False
        logger.warning("worker %s (pid %d) %s: its rows are run again in a new one", old.name, old.pid, fate)
        again = rebuild(worker)
        talk.messages[: talk.silent] = again
        talk.silent = len(again)
        self._tell(worker, talk, rebuild)
        return True
