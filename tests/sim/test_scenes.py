"""Chance in a scene: a pure function of the seed, within its bounds."""

import numpy as np
import pytest

from sim.seeding import draw_scene
from tasks.task import Scene


def test_scene_depends_on_the_seed_alone():
    first = draw_scene(Scene(), 5)
    np.random.default_rng(5).random(1000)
    np.random.seed(5)  # noqa: NPY002 (the global generator is what robosuite draws from)
    np.random.rand(1000)  # noqa: NPY002
    again, other = draw_scene(Scene(), 5), draw_scene(Scene(), 6)
    assert first.cube_xy.tobytes() == again.cube_xy.tobytes() and first.joint_noise.tobytes() == again.joint_noise.tobytes()
    assert not np.array_equal(first.cube_xy, other.cube_xy)


def test_cubes_fill_the_region_and_keep_their_distance():
    scene = Scene()
    draws = [draw_scene(scene, seed) for seed in range(2000)]
    xy = np.stack([d.cube_xy for d in draws])
    assert np.abs(xy).max() <= 0.10 and np.abs(xy).max(axis=(0, 1)).min() > 0.099
    assert np.linalg.norm(xy[:, 0] - xy[:, 1], axis=1).min() >= 0.07
    assert np.abs(xy.mean(axis=(0, 1))).max() < 0.005
    assert np.stack([d.joint_noise for d in draws]).std() == pytest.approx(0.02, rel=0.03)
    yaw = np.stack([d.cube_yaw for d in draws])
    assert yaw.min() < -3.1 and yaw.max() > 3.1
