"""Simulators for the tests: the model compiled once, single simulations in this process, and one pool of two workers."""

import os

import pytest

from sim.cache import cache_folder
from sim.opengl import choose_platform

# Before anything imports MuJoCo or numba: both read these once.
os.environ.setdefault("MUJOCO_GL", choose_platform())
os.environ.setdefault("LP_NUM_THREADS", "0")
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))


@pytest.fixture(scope="session")
def task():
    from tasks.task import get_task

    return get_task("lift_cube")


@pytest.fixture(scope="session")
def real(task):
    """Two workers, four rows."""
    from sim.real import RealEnvironment

    with RealEnvironment(task, width=4, num_workers=2) as environment:
        yield environment


@pytest.fixture(scope="session")
def stage(task, real):
    """Model and renderer of this process. After `real`, so that a missing model is made outside the test process."""
    from sim.environment import Stage
    from tasks.starts import make_starts

    real.reset(make_starts(task, "train", 1))
    stage = Stage(task, 64)
    yield stage
    stage.close()


@pytest.fixture
def environment(task, stage):
    from sim.environment import RobotTask

    return RobotTask(task, stage=stage)


@pytest.fixture
def simulation(stage):
    from sim.simulation import Simulation

    return Simulation(stage.compiled)
