"""The report's plots, as SVG text: one function per question, drawn from records of metrics.jsonl without any global state.

Every function takes what it plots as plain lists (NaN or None: no such number) and returns an SVG document.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wmrl.statistics import wilson_interval

REAL, IMAGINED, NEUTRAL, ACCENT = "#1f6fb2", "#d9822b", "#5b6770", "#7a4fa3"
_TRUST_COLOURS = {"COLD": "#d0d7de", "PPI": "#bcd4ec", "FUSE": "#b7e0c2", "DISTRUST": "#f2c0bc"}
Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Point:
    """A measured success rate: where it stands on the horizontal axis, successes of n, and what to call it."""

    x: float
    successes: int
    n: int
    label: str


def success_curve(x: Numbers, real: Numbers, rollouts: Numbers, *, xlabel: str, evaluations: Sequence[Point] = ()) -> str:
    """Training success of each step with its Wilson interval, its running mean, and the evaluations as large points."""
    figure, axes = _figure()
    xs, ys, n = _array(x), _array(real), _array(rollouts)
    keep = np.isfinite(xs) & np.isfinite(ys) & (n > 0)
    xs, ys, n = xs[keep], ys[keep], n[keep].astype(int)
    if len(xs):
        bounds = np.array([wilson_interval(round(rate * count), count)[1:] for rate, count in zip(ys, n, strict=True)])
        axes.vlines(xs, bounds[:, 0], bounds[:, 1], color=REAL, alpha=0.25, linewidth=2)
        axes.plot(xs, ys, ".", color=REAL, alpha=0.6, label=f"training rollouts, {_range(n)} a step (sampled)")
        axes.plot(xs, _running_mean(ys, n), color=REAL, label="their mean over 5 steps")
    for point, colour in zip(evaluations, (NEUTRAL, ACCENT, IMAGINED), strict=False):
        rate, low, high = wilson_interval(point.successes, point.n)
        axes.errorbar(
            [point.x],
            [rate],
            [[rate - low], [high - rate]],
            fmt="D",
            color=colour,
            capsize=4,
            label=f"{point.label} (n={point.n})",
        )
    _finish(axes, xlabel, "success", unit_range=True)
    return _svg(figure)


def real_and_imagined(steps: Numbers, real: Numbers, imagined: Numbers) -> str:
    """Real success beside what the world model imagines for the same policy; the gap between them is exploitation."""
    figure, axes = _figure()
    axes.plot(_array(steps), _array(real), ".-", color=REAL, label="real")
    axes.plot(_array(steps), _array(imagined), ".-", color=IMAGINED, label="imagined")
    _finish(axes, "training step", "success", unit_range=True)
    return _svg(figure)


def band(steps: Numbers, middle: Numbers, low: Numbers, high: Numbers, *, ylabel: str, label: str) -> str:
    """A number with its interval over the steps, and the zero line."""
    figure, axes = _figure()
    axes.axhline(0.0, color=NEUTRAL, linewidth=0.8)
    axes.fill_between(_array(steps), _array(low), _array(high), color=IMAGINED, alpha=0.2, linewidth=0)
    axes.plot(_array(steps), _array(middle), ".-", color=IMAGINED, label=label)
    _finish(axes, "training step", ylabel)
    return _svg(figure)


def lines(steps: Numbers, series: Mapping[str, Numbers], *, ylabel: str, unit_range: bool = False) -> str:
    """Several numbers over the steps."""
    figure, axes = _figure()
    for (name, values), colour in zip(series.items(), (IMAGINED, REAL, ACCENT, NEUTRAL), strict=False):
        axes.plot(_array(steps), _array(values), ".-", color=colour, label=name)
    _finish(axes, "training step", ylabel, unit_range=unit_range)
    return _svg(figure)


def trust_and_weights(steps: Numbers, states: Sequence[str], weights: Mapping[str, Numbers]) -> str:
    """The weights of the correction over the steps, on a background that shows the trust state."""
    figure, axes = _figure()
    xs = _array(steps)
    seen: set[str] = set()
    for index, state in enumerate(states):
        colour = _TRUST_COLOURS.get(state.upper(), "#eeeeee")
        axes.axvspan(
            xs[index] - 0.5, xs[index] + 0.5, color=colour, linewidth=0, label=None if state in seen else f"trust: {state}"
        )
        seen.add(state)
    for (name, values), colour in zip(weights.items(), (ACCENT, IMAGINED, REAL), strict=False):
        axes.plot(xs, _array(values), ".-", color=colour, label=name)
    _finish(axes, "training step", "weight")
    return _svg(figure)


def stacked_seconds(steps: Numbers, phases: Mapping[str, Numbers]) -> str:
    """Seconds of each step by phase."""
    figure, axes = _figure()
    values = [np.nan_to_num(_array(seconds)) for seconds in phases.values()]
    axes.stackplot(_array(steps), *values, labels=list(phases), alpha=0.8)
    _finish(axes, "training step", "seconds")
    return _svg(figure)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Axes, xlabel: str, ylabel: str, *, unit_range: bool = False) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if unit_range:
        axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.8)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _array(values: Numbers) -> np.ndarray:
    return np.array([np.nan if value is None else float(value) for value in values])


def _running_mean(values: np.ndarray, counts: np.ndarray, window: int = 5) -> np.ndarray:
    """Mean of the last `window` steps, weighted by their rollouts."""
    ones = np.ones(window)
    size = len(values)
    return np.convolve(values * counts, ones)[:size] / np.convolve(counts, ones)[:size]


def _range(counts: np.ndarray) -> str:
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low}-{high}"
