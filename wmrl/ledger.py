"""The ledger: what was spent, in decisions, episodes and seconds, by purpose. Only the final evaluation and the videos
are free, and kept apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wmrl.types import Rollouts

_COUNTS = ("decisions", "episodes", "seconds")
_AFTERWARDS = ("evaluate", "videos")
"""Phases that no training step has: a checkpoint's ledger may be older than they are."""


class Ledger:
    """Counts per purpose (demonstrations, base rollouts, anchors, exam, ...) and wall and CPU seconds per phase.

    CPU seconds are those of this process; what simulator workers burn is in `seconds` of the real purposes.
    """

    def __init__(self) -> None:
        self._real: dict[str, dict[str, float]] = {}
        self._imagined: dict[str, dict[str, float]] = {}
        self._free: dict[str, dict[str, float]] = {}
        self._phases: dict[str, dict[str, float]] = {}

    def record(self, purpose: str, rollouts: Rollouts, *, free: bool = False) -> None:
        """Book a batch under `purpose`; `free` marks the final evaluation and videos, which no budget pays for."""
        book = self._free if free else self._imagined if rollouts.imagined else self._real
        self._add(book, purpose, rollouts.num_decisions(), len(rollouts), float(rollouts.seconds.sum()))

    def record_counts(self, purpose: str, *, decisions: int, episodes: int, seconds: float, imagined: bool = False) -> None:
        """Book what was not played as rollouts, such as demonstrations."""
        self._add(self._imagined if imagined else self._real, purpose, decisions, episodes, seconds)

    def has(self, purpose: str) -> bool:
        """Whether anything real was booked under `purpose`: what a killed run made, but could not book, is booked later."""
        return purpose in self._real

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; wall and CPU seconds add up over the run."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            entry = self._phases.setdefault(name, {"wall": 0.0, "cpu": 0.0})
            entry["wall"] += time.perf_counter() - wall
            entry["cpu"] += time.process_time() - cpu

    def wall_seconds(self) -> dict[str, float]:
        """Wall seconds per phase so far."""
        return {name: entry["wall"] for name, entry in self._phases.items()}

    @property
    def real_decisions(self) -> int:
        return self._total(self._real, "decisions")

    @property
    def imagined_decisions(self) -> int:
        return self._total(self._imagined, "decisions")

    @property
    def real_episodes(self) -> int:
        return self._total(self._real, "episodes")

    @property
    def imagined_episodes(self) -> int:
        return self._total(self._imagined, "episodes")

    def summary(self) -> dict[str, Any]:
        """Totals, purposes and phases as plain values, for `ledger.json`."""
        return {
            "real_decisions": self.real_decisions,
            "imagined_decisions": self.imagined_decisions,
            "real_episodes": self.real_episodes,
            "imagined_episodes": self.imagined_episodes,
            "seconds": {name: dict(entry) for name, entry in self._phases.items()},
            "real": {name: dict(entry) for name, entry in self._real.items()},
            "imagined": {name: dict(entry) for name, entry in self._imagined.items()},
            "free": {name: dict(entry) for name, entry in self._free.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.summary()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        books = (self._real, state["real"]), (self._imagined, state["imagined"]), (self._free, state["free"])
        for book, saved in (*books, (self._phases, state["seconds"])):
            book.clear()
            book.update({name: dict(entry) for name, entry in saved.items()})

    def keep_later(self, written: dict[str, Any]) -> None:
        """Take over the final evaluation and the phases after training from a newer ledger than the one that was loaded."""
        self._free.update({name: dict(entry) for name, entry in written["free"].items()})
        self._phases.update({name: dict(written["seconds"][name]) for name in _AFTERWARDS if name in written["seconds"]})

    @staticmethod
    def _add(book: dict[str, dict[str, float]], purpose: str, *amounts: float) -> None:
        entry = book.setdefault(purpose, dict.fromkeys(_COUNTS, 0))
        for name, amount in zip(_COUNTS, amounts, strict=True):
            entry[name] += amount

    @staticmethod
    def _total(book: dict[str, dict[str, float]], name: str) -> int:
        return int(sum(entry[name] for entry in book.values()))
