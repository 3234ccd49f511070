"""The scene as a stock robosuite environment: a Panda before a table with coloured cubes. Makes the model, and checks it.

The only file that imports robosuite (5-13 s). Everything else works on the compiled model.
"""

from __future__ import annotations

import types
from typing import Any

import mujoco
import numpy as np
import robosuite.controllers.parts.controller as robosuite_controller
from robosuite.environments.manipulation.manipulation_env import ManipulationEnv
from robosuite.models.arenas import TableArena
from robosuite.models.objects import BoxObject
from robosuite.models.tasks import ManipulationTask
from robosuite.utils.mjcf_utils import CustomMaterial

from tasks.task import Scene, Task

TABLE_TOP = 0.8
"""Height of the table top, metres; the table of robosuite's Lift."""

_TEXTURES = {"red": "WoodRed", "green": "WoodGreen", "blue": "WoodBlue"}


class CubeScene(ManipulationEnv):
    """robosuite's Lift arena with one cube per colour of `scene`. Cubes are placed by the caller."""

    def __init__(self, scene: Scene, **options: Any) -> None:
        self.scene = scene
        super().__init__(**options)

    def _load_model(self) -> None:
        super()._load_model()
        model = self.robots[0].robot_model
        model.set_base_xpos(model.base_xpos_offset["table"](0.8))
        arena = TableArena(table_full_size=(0.8, 0.8, 0.05), table_friction=(1.0, 5e-3, 1e-4), table_offset=(0, 0, TABLE_TOP))
        arena.set_origin([0, 0, 0])
        self.cubes = [_cube(color, self.scene.cube_half_size) for color in self.scene.cubes]
        self.model = ManipulationTask(mujoco_arena=arena, mujoco_robots=[model], mujoco_objects=self.cubes)

    def reward(self, action: np.ndarray | None = None) -> float:
        """Zero: goals and rewards are ours, see `sim.simulation`."""
        return 0.0


def _cube(color: str, half_size: float) -> BoxObject:
    material = CustomMaterial(
        texture=_TEXTURES[color],
        tex_name=f"{color}_wood",
        mat_name=f"{color}_wood_material",
        tex_attrib={"type": "cube"},
        mat_attrib={"texrepeat": "1 1", "specular": "0.4", "shininess": "0.1"},
    )
    return BoxObject(name=f"cube_{color}", size=[half_size] * 3, rgba=[1, 1, 1, 1], material=material)


def make_stock(task: Task) -> CubeScene:
    """The stock robosuite environment of a task: 20 Hz operational-space deltas, no cameras, never done."""
    support_new_mujoco()
    return CubeScene(
        task.scene,
        robots=task.robot,
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=task.control_frequency,
        ignore_done=True,
        hard_reset=False,
    )


def support_new_mujoco() -> None:
    """Let robosuite 1.5.1 run on MuJoCo 3.10, whose `mj_fullM` takes the data instead of its sparse matrix.

    Replaces the name `mujoco` inside robosuite's controller module only; MuJoCo itself is left alone.
    """
    version = tuple(int(part) for part in mujoco.__version__.split(".")[:2])
    if version < (3, 10) or isinstance(robosuite_controller.mujoco, _OldMassMatrix):
        return
    adapter = _OldMassMatrix("mujoco")
    original = robosuite_controller.Controller.update

    def update(controller: Any, force: bool = False) -> None:
        adapter.data = controller.sim.data._data
        original(controller, force)

    robosuite_controller.Controller.update = update
    robosuite_controller.mujoco = adapter


class _OldMassMatrix(types.ModuleType):
    data: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(mujoco, name)

    def mj_fullM(self, model: Any, destination: np.ndarray, _: np.ndarray) -> None:
        mujoco.mj_fullM(model, self.data, destination)
