"""The ways in which an expert is made to fail on purpose. Imports no simulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Perturbation:
    """How an expert is led astray. Without arguments it is not.

    offsets      (N, 3) metres: the k-th grasp attempt aims this far beside the cube; attempts beyond N aim true
    close_early  fingers begin to close this far above the cube, metres
    close_late   control steps that the grip waits at the cube before it closes
    wrong_cube   aim at another cube than the goal
    """

    offsets: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    close_early: float = 0.0
    close_late: int = 0
    wrong_cube: bool = False


PERTURBATIONS = ("none", "near_miss", "early", "late", "wrong_cube")


def draw_perturbation(kind: str, generator: np.random.Generator) -> Perturbation:
    """A random perturbation of one kind; offsets are 1-5 cm sideways in any direction and up to 3 cm up."""
    if kind == "near_miss":
        attempts = int(generator.integers(1, 3))
        angle = generator.uniform(-np.pi, np.pi, attempts)
        radius = generator.uniform(0.01, 0.05, attempts)
        height = generator.uniform(0.0, 0.03, attempts)
        return Perturbation(offsets=np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1))
    if kind == "early":
        return Perturbation(close_early=float(generator.uniform(0.02, 0.07)))
    if kind == "late":
        return Perturbation(close_late=int(generator.integers(4, 20)))
    if kind == "wrong_cube":
        return Perturbation(wrong_cube=True)
    if kind == "none":
        return Perturbation()
    raise ValueError(f"expected a perturbation out of {PERTURBATIONS}, got {kind!r}")
