"""Progress for people: a bar with the time left on a terminal, a plain line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """Counts up to `total` units of work, from `start` (what an earlier process has done); a context manager.

    with Progress("imitate", 1000, unit="step") as progress:
        progress.update(10, {"loss": 0.5})     # ten are done; the numbers stand behind the bar
    """

    def __init__(
        self,
        name: str,
        total: int,
        *,
        unit: str = "step",
        start: int = 0,
        stream: TextIO | None = None,
        every: float = LINE_EVERY,
    ) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._done = self._start = start
        self._stream = sys.stderr if stream is None else stream
        self._every = every
        self._began = self._shown = time.monotonic()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, desc=name, unit=unit, initial=start, file=self._stream, dynamic_ncols=True)

    def update(self, done: int, numbers: Mapping[str, float | str] | None = None) -> None:
        """`done` units are done in all; `numbers` are shown beside."""
        fresh, self._done = done - self._done, done
        numbers = numbers or {}
        if self._bar is not None:
            self._bar.set_postfix({key: format_number(value) for key, value in numbers.items()}, refresh=False)
            self._bar.update(fresh)
            return
        now = time.monotonic()
        if now - self._shown >= self._every or done >= self._total:
            self._shown = now
            print(self._line(now, numbers), file=self._stream, flush=True)

    def advance(self) -> None:
        """One more unit is done."""
        self.update(self._done + 1)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _line(self, now: float, numbers: Mapping[str, float | str]) -> str:
        elapsed, fresh = now - self._began, self._done - self._start
        left = elapsed / fresh * (self._total - self._done) if fresh else 0.0
        shown = "".join(f", {key} {format_number(value)}" for key, value in numbers.items())
        return f"{self._name}: {self._done}/{self._total} {self._unit}s in {duration(elapsed)}, {duration(left)} left{shown}"


@contextmanager
def stage(title: str, *, stream: TextIO | None = None) -> Iterator[None]:
    """A stage of a run: `== imitate ==` before it, and how long it took after it."""
    note(f"\n== {title} ==", stream=stream)
    began = time.monotonic()
    yield
    note(f"   done in {duration(time.monotonic() - began)}", stream=stream)


def note(text: str, *, stream: TextIO | None = None) -> None:
    """A line for the reader that does not tear a progress bar."""
    tqdm.write(text, file=sys.stderr if stream is None else stream)


def duration(seconds: float) -> str:
    """`7 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rate(successes: int, n: int) -> str:
    """`0.54 [0.47, 0.61] (n=200)`: a success rate as it is printed everywhere, with its Wilson interval."""
    from wmrl.statistics import wilson_interval

    if n == 0:
        return "none of 0"
    estimate, low, high = wilson_interval(successes, n)
    return f"{estimate:.2f} [{low:.2f}, {high:.2f}] (n={n})"


def format_number(value: float | str) -> str:
    """Three significant digits."""
    return value if isinstance(value, str) else f"{value:.3g}"
