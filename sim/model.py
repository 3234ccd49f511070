"""The compiled MuJoCo model of a task and the indices that stepping needs: made once with robosuite, then cached."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from sim.cache import cached_folder
from tasks.task import Task

BUILD_VERSION = 3
"""Raise when the code that makes a model changes what it makes."""


@dataclass(frozen=True)
class Layout:
    """Where things are in a compiled model, and the controller constants that robosuite chose."""

    arm_qpos: tuple[int, ...]
    arm_qvel: tuple[int, ...]
    arm_actuators: tuple[int, ...]
    gripper_qpos: tuple[int, ...]
    gripper_actuators: tuple[int, ...]
    cube_qpos: tuple[int, ...]
    grip_site: int
    origin_site: int
    initial_arm: tuple[float, ...]
    initial_gripper: tuple[float, ...]
    gripper_speed: float
    kp: tuple[float, ...]
    kd: tuple[float, ...]
    action_scale: tuple[float, ...]
    cameras: dict[str, str]


@dataclass(frozen=True)
class CompiledModel:
    """A model with its layout. `full` keeps every visual triangle (for videos), otherwise visual meshes are decimated."""

    task: Task
    model: mujoco.MjModel
    layout: Layout
    full: bool = False


def load_model(task: Task, full: bool = False) -> CompiledModel:
    """The compiled model of a task, from the cache; made first (10-30 s) when it is not there."""
    folder = cached_folder("models", _key(task), lambda target: _build(task, target))
    model = mujoco.MjModel.from_binary_path(str(folder / ("full.mjb" if full else "fast.mjb")))
    content: dict[str, Any] = json.loads((folder / "layout.json").read_text())
    layout = Layout(**{name: _frozen(value) for name, value in content.items()})
    return CompiledModel(task, model, layout, full)


def stock_environment(task: Task) -> Any:
    """The stock robosuite environment of a task (importing robosuite takes 3-13 s).

    Its import warnings and start-up notices are kept from the user: they speak of optional parts that we do not use.
    """
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from sim.robosuite_scene import make_stock

        return make_stock(task)


def _key(task: Task) -> dict[str, object]:
    versions = {name: importlib.metadata.version(name) for name in ("robosuite", "mujoco", "fast-simplification")}
    return {"build": BUILD_VERSION, "versions": versions, "robot": task.robot, "scene": asdict(task.scene)}


def _build(task: Task, folder: Path) -> None:
    from sim.lightening import decimate_visual_meshes, shrink_textures

    stock = stock_environment(task)
    (folder / "layout.json").write_text(json.dumps(asdict(_layout(stock, task))))
    full = stock.sim.model._model
    xml = stock.edit_model_xml(stock.model.get_xml())  # as robosuite compiles it; MuJoCo's own text would round the numbers
    mujoco.mj_saveModel(full, str(folder / "full.mjb"), None)
    with tempfile.TemporaryDirectory() as scratch:
        lighter = shrink_textures(decimate_visual_meshes(xml, full, Path(scratch)), Path(scratch))
        mujoco.mj_saveModel(mujoco.MjModel.from_xml_string(lighter), str(folder / "fast.mjb"), None)


def _layout(stock: Any, task: Task) -> Layout:
    """Read indices and controller constants off a stock environment; refuse what the lean step does not cover."""
    robot = stock.robots[0]
    model = stock.sim.model
    arm = robot.part_controllers["right"]
    _require_covered(arm, robot.composite_controller.name)
    gripper = robot.gripper["right"]
    return Layout(
        arm_qpos=_ints(arm.qpos_index),
        arm_qvel=_ints(arm.qvel_index),
        arm_actuators=_ints(robot._ref_actuators_indexes_dict["right"]),
        gripper_qpos=_ints(robot._ref_gripper_joint_pos_indexes["right"]),
        gripper_actuators=_ints(robot._ref_actuators_indexes_dict["right_gripper"]),
        cube_qpos=tuple(int(model.get_joint_qpos_addr(f"cube_{color}_joint0")[0]) for color in task.scene.cubes),
        grip_site=model.site_name2id(gripper.important_sites["grip_site"]),
        origin_site=model.site_name2id("robot0_right_center"),
        initial_arm=_floats(robot.init_qpos),
        initial_gripper=_floats(gripper.init_qpos),
        gripper_speed=float(gripper.speed),
        kp=_floats(arm.kp),
        kd=_floats(arm.kd),
        action_scale=_floats(arm.output_max),
        cameras={"agentview": "agentview", "wrist": "robot0_eye_in_hand"},
    )


def _require_covered(controller: Any, composite: str) -> None:
    """The lean step is operational-space pose control by deltas in the base frame with decoupled axes; nothing else."""
    wanted = {
        "name": "OSC_POSE",
        "impedance_mode": "fixed",
        "input_type": "delta",
        "input_ref_frame": "base",
        "uncoupling": True,
        "interpolator_pos": None,
        "interpolator_ori": None,
    }
    for name, value in wanted.items():
        got = getattr(controller, name)
        if got != value:
            raise ValueError(f"expected a controller with {name} = {value!r} for lean steps, got {got!r}: use the stock step")
    if composite != "BASIC":
        raise ValueError(f"expected the BASIC composite controller for lean stepping, got {composite!r}: use the stock step")
    symmetric = np.allclose(controller.output_min, -controller.output_max)
    unit = np.allclose(controller.input_max, 1.0) and np.allclose(controller.input_min, -1.0)
    if not (symmetric and unit):
        raise ValueError("expected symmetric output limits and inputs in [-1, 1] for lean stepping: use the stock step")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
