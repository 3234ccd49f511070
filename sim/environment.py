"""A robot task as a Gymnasium environment. One step executes one action chunk open loop, or less when the goal is reached.

Legend: H control steps of a chunk. Everything heavy (model, OpenGL) is made at the first reset: making an environment is free.
Imports neither torch nor robosuite, so that worker processes stay small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from sim.opengl import prepare
from tasks.task import Task, get_task, require_known

ACTION_NAMES = ("dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper")

PROPRIOCEPTION = (
    *("grip_x", "grip_y", "grip_z"),
    *("axis_x_x", "axis_x_y", "axis_x_z", "axis_y_x", "axis_y_y", "axis_y_z"),
    *("finger_left", "finger_right", "gripper_command"),
    *("velocity_x", "velocity_y", "velocity_z"),
)
"""Grip-site position relative to the table-top centre (m), first two columns of its rotation, finger joints (m), the gripper's
commanded opening in [-1, 1] (+1 closed; part of the controller's state), and grip-site velocity (m/s)."""

OBJECT = ("x", "y", "z", "cos_4_yaw", "sin_4_yaw")
"""Per cube: centre relative to the table-top centre (m), and its yaw up to the quarter turns that a cube does not show."""

GOAL = ("x", "y", "z", "along_grip_x", "along_grip_y", "sideways", "height", "cos_4_yaw", "sin_4_yaw")
"""The goal cube's centre relative to the grip site (m): in world axes, along the grip's own axes, horizontal distance; its
height above the table top (m), and its yaw relative to the grip's heading. For critics: no policy reads it."""

NUMBERS = ("proprio", "objects", "goal", "time")
"""The entries of an observation that are vectors."""


class Stage:
    """The model of a task and its renderers, shared by all environments of a process. Made lazily; `close` frees OpenGL."""

    def __init__(self, task: Task, image_size: int) -> None:
        self.task = task
        self.image_size = image_size
        self._cache: dict[tuple[str, int, bool], Any] = {}

    @property
    def compiled(self) -> Any:
        """The decimated `CompiledModel`."""
        return self._compiled(full=False, size=0)

    def renderer(self, size: int, full: bool = False) -> Any:
        """The `Renderer` of that size and quality."""
        prepare()
        from sim.rendering import Renderer

        key = ("renderer", size, full)
        if key not in self._cache:
            self._cache[key] = Renderer(self._compiled(full, size), size, full)
        return self._cache[key]

    def video_frame(self, simulation: Any, camera: str, size: int, full: bool) -> np.ndarray:
        """(size, size, 3) picture of a simulation; with full=True from the model with every triangle."""
        if not full:
            return self.renderer(size).render(simulation.data, camera)
        from sim.simulation import Simulation

        key = ("double", size, full)
        if key not in self._cache:
            self._cache[key] = Simulation(self._compiled(full, size))
        double = self._cache[key]
        double.data.qpos[:] = simulation.data.qpos
        double.update_pose()
        return self.renderer(size, full).render(double.data, camera)

    def close(self) -> None:
        """Free the renderers."""
        for (kind, _, _), value in self._cache.items():
            if kind == "renderer":
                value.close()
        self._cache.clear()

    def _compiled(self, full: bool, size: int) -> Any:
        prepare()
        from sim.model import load_model

        # The physics model serves the policy's pictures too; other sizes load their own: a renderer sets its model's buffers.
        key = ("model", 0 if size == self.image_size and not full else size, full)
        if key not in self._cache:
            self._cache[key] = load_model(self.task, full)
        return self._cache[key]


class RobotTask(gymnasium.Env):
    """One robot task. Reset with `seed` (the scene) and `options={"instruction": ...}` (the goal; default: the first).

    action       (H, 7) float32 in [-1, 1]: dx dy dz droll dpitch dyaw gripper (+1 closes); beyond is clipped and counted
    observation  `pixels` (dict of cameras, uint8 upright RGB), `proprio` (P,), `objects` (O,) and `goal` (G,)
                 privileged, `time` (1,) share of the horizon used
    info         `is_success`, `status` (running, success, time_limit, unstable), `control_steps`, `clipped`, `instruction`
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        task: str | Task = "lift_cube",
        *,
        chunk: int = 8,
        image_size: int = 64,
        stage: Stage | None = None,
        render_mode: str = "rgb_array",
    ) -> None:
        self.spec_task = get_task(task) if isinstance(task, str) else task
        self.spec_task.num_decisions(chunk)
        if image_size < 8:
            raise ValueError(f"expected an image size of at least 8 pixels, got {image_size}")
        self.task = self.spec_task.name
        self.task_description = self.spec_task.goals[0][1]
        self.render_mode = render_mode
        self.chunk = chunk
        self._max_episode_steps = self.spec_task.num_decisions(chunk)
        self._owns_stage = stage is None
        self._stage = stage or Stage(self.spec_task, image_size)
        self._goal = self.spec_task.goals[0][0]
        self.simulation: Any = None
        self.on_control_step: Callable[[RobotTask], None] | None = None
        """Called after every control step (videos, records)."""
        self._steps = 0
        self._status = "running"
        self._observation: dict[str, Any] = {}
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (chunk, len(ACTION_NAMES)), np.float32)
        self.observation_space = observation_space(self.spec_task, image_size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode. Without a seed the scene comes from `np_random`. Unknown options are ignored (LeRobot has some)."""
        super().reset(seed=seed)
        instruction = (options or {}).get("instruction", self.spec_task.goals[0][1])
        self._goal = self.spec_task.goal_of(instruction)
        self.task_description = instruction
        if self.simulation is None:
            from sim.simulation import Simulation

            self.simulation = Simulation(self._stage.compiled)
        self.simulation.reset(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._steps, self._status = 0, "running"
        self.simulation.update_pose()
        self._observation = self.observe()
        return self._observation, self._info(clipped=0)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute a chunk (H, 7). Success terminates, the time limit truncates, a broken simulation terminates unsuccessful."""
        if self._status != "running" or self.simulation is None:
            raise ValueError(f"expected a running episode, got one that is {self._status!r}: call reset first")
        chunk = check_actions(action, (self.chunk, len(ACTION_NAMES)))
        clipped = np.clip(chunk, -1.0, 1.0)
        for command in clipped[: self.spec_task.horizon - self._steps]:
            if self.control_step(command) != "running":
                break
        if self._status != "unstable":  # the last sane observation stands for a broken state, so that nothing non-finite leaves
            self.simulation.update_pose()
            self._observation = self.observe()
        terminated = self._status in ("success", "unstable")
        reward = 1.0 if self._status == "success" else 0.0
        info = self._info(clipped=int((clipped != chunk).sum()))
        return self._observation, reward, terminated, self._status == "time_limit", info

    def control_step(self, command: np.ndarray) -> str:
        """Execute one control step of a command (7,) in [-1, 1]; the status after it. `step` is made of these."""
        self.simulation.control_step(command)
        self._steps += 1
        self._status = self._judge()
        if self.on_control_step is not None and self._status != "unstable":
            self.simulation.update_pose()
            self.on_control_step(self)
        return self._status

    def observe(self) -> dict[str, Any]:
        """The observation of the state of now, in fresh arrays."""
        renderer = self._stage.renderer(self._stage.image_size)
        return {
            "pixels": renderer.render_all(self.simulation.data, self.spec_task.cameras),
            "proprio": self.simulation.proprioception(),
            "objects": self.simulation.objects(),
            "goal": self.simulation.goal_from_grip(self._goal),
            "time": np.array([self._steps / self.spec_task.horizon], dtype=np.float32),
        }

    def render(self) -> np.ndarray:
        """(256, 256, 3) picture for people."""
        self.simulation.update_pose()
        return self._stage.video_frame(self.simulation, self.spec_task.cameras[0], 256, full=False)

    def close(self) -> None:
        """Free OpenGL unless the stage is shared. The next reset makes everything anew."""
        self.simulation = None
        if self._owns_stage:
            self._stage.close()

    @property
    def goal(self) -> str:
        """The goal of the running episode."""
        return self._goal

    @property
    def control_steps(self) -> int:
        """Control steps executed since the reset."""
        return self._steps

    def _judge(self) -> str:
        if self.simulation.unstable():
            return "unstable"
        if self.simulation.lifted(self._goal):
            return "success"
        return "time_limit" if self._steps >= self.spec_task.horizon else "running"

    def _info(self, clipped: int) -> dict[str, Any]:
        return {
            "is_success": self._status == "success",
            "status": self._status,
            "control_steps": self._steps,
            "clipped": clipped,
            "instruction": self.task_description,
        }


def observation_space(task: Task, image_size: int) -> gymnasium.spaces.Dict:
    """The observation space, known without a simulator."""
    spaces = gymnasium.spaces
    picture = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    return spaces.Dict(
        {
            "pixels": spaces.Dict({camera: picture for camera in task.cameras}),
            "proprio": spaces.Box(-np.inf, np.inf, (len(PROPRIOCEPTION),), np.float32),
            "objects": spaces.Box(-np.inf, np.inf, (len(OBJECT) * len(task.scene.cubes),), np.float32),
            "goal": spaces.Box(-np.inf, np.inf, (len(GOAL),), np.float32),
            "time": spaces.Box(0.0, 1.0, (1,), np.float32),
        }
    )


def check_actions(actions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Actions as float64 of that shape, all finite; ValueError naming the first bad control step and dimension."""
    actions = np.asarray(actions, dtype=np.float64)
    if actions.shape != shape:
        raise ValueError(f"expected actions of shape {shape}, got {actions.shape}")
    bad = np.argwhere(~np.isfinite(actions))
    if len(bad):
        *where, step, dimension = (int(i) for i in bad[0])
        row = f"row {where[0]}, " if where else ""
        raise ValueError(
            f"expected finite actions, got {actions[tuple(bad[0])]} in {row}control step {step}, dimension {dimension} "
            f"({ACTION_NAMES[dimension]}): the policy has diverged"
        )
    return actions


def check_camera(task: Task, camera: str) -> None:
    """ValueError for a camera the task does not have."""
    require_known("camera", camera, task.cameras)
