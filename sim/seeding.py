"""The one place where chance enters a scene: cube poses and joint noise as a pure function of task and seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.task import Scene

_MAXIMUM_TRIES = 10_000


@dataclass(frozen=True)
class SceneDraw:
    """What a seed decides. N cubes.

    joint_noise (7,) radians, added to the robot's resting joint angles
    cube_xy     (N, 2) metres from the table centre; cube_yaw (N,) radians
    """

    joint_noise: np.ndarray
    cube_xy: np.ndarray
    cube_yaw: np.ndarray


def draw_scene(scene: Scene, seed: int) -> SceneDraw:
    """Cubes uniform in the square given that all are far enough apart, any yaw; Gaussian joint noise."""
    generator = np.random.default_rng([seed, 0x5CE2E])
    noise = scene.joint_noise * generator.standard_normal(7)
    yaw = generator.uniform(-np.pi, np.pi, len(scene.cubes))
    for _ in range(_MAXIMUM_TRIES):
        xy = generator.uniform(-scene.half_width, scene.half_width, (len(scene.cubes), 2))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1)[np.triu_indices(len(xy), 1)]
        if np.all(gaps >= scene.minimum_distance):
            return SceneDraw(noise, xy, yaw)
    raise ValueError(f"expected room for the cubes {scene.cubes}, found none in {_MAXIMUM_TRIES} tries: widen half_width")
