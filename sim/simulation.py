"""One simulated robot on a shared model: seeded reset, lean control steps, proprioception, privileged object poses, success.

Legend: P = 15 proprioceptive numbers, O = 5 numbers per cube. Physics are those of stock robosuite: 25 substeps of 2 ms per
control step, torque recomputed at each; only what does not act on the physics is left out (observables, buffers, look-ups).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np

from sim import controller
from sim.model import CompiledModel
from sim.seeding import draw_scene

TABLE_TOP = 0.8
PLACEMENT_GAP = 0.001
"""Cubes start this far above the table and fall; starting in exact contact is numerically awkward."""

LARGEST_SPEED = 100.0
"""Joint speeds beyond this (rad/s or m/s) are no physics any more."""

_RESTARTS = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)


@dataclass
class State:
    """Everything that the future of a simulation depends on."""

    physics: np.ndarray
    gripper_command: float
    rest: np.ndarray


class Simulation:
    """One `MjData` on a shared model."""

    def __init__(self, compiled: CompiledModel) -> None:
        self.compiled = compiled
        self.model = compiled.model
        self.data = mujoco.MjData(compiled.model)
        layout = compiled.layout
        self._arm_qpos, self._arm_qvel, actuators = (_span(s) for s in (layout.arm_qpos, layout.arm_qvel, layout.arm_actuators))
        self._arm_low, self._arm_high = self.model.actuator_ctrlrange[actuators].T.copy()
        self._gripper_range = self.model.actuator_ctrlrange[list(layout.gripper_actuators)].copy()
        self._scale = np.array(layout.action_scale)
        self._substeps = round(1.0 / (compiled.task.control_frequency * self.model.opt.timestep))
        self._jacobian = np.zeros((6, self.model.nv))
        self._mass = np.zeros((self.model.nv, self.model.nv))
        # Views into MuJoCo's memory, made once: making them at each of 25 substeps would cost a tenth of the step.
        data = self.data
        self._control = data.ctrl[actuators]
        self._arm_state = (data.qfrc_bias[self._arm_qvel], data.qpos[self._arm_qpos], data.qvel[self._arm_qvel])
        self._grip = (data.site_xpos[layout.grip_site], data.site_xmat[layout.grip_site])
        self._full_mass = _full_mass_function()
        self.gripper_command = 0.0
        self._rest = np.zeros(len(layout.arm_qpos))

    def reset(self, seed: int) -> None:
        """The first state of a seed: all is reset (state, warm start, controls, gripper command), nothing carries over."""
        layout, scene = self.compiled.layout, self.compiled.task.scene
        draw = draw_scene(scene, seed)
        mujoco.mj_resetData(self.model, self.data)
        qpos = self.data.qpos
        qpos[self._arm_qpos] = np.array(layout.initial_arm) + draw.joint_noise
        qpos[list(layout.gripper_qpos)] = layout.initial_gripper
        for address, xy, yaw in zip(layout.cube_qpos, draw.cube_xy, draw.cube_yaw, strict=True):
            qpos[address : address + 3] = (*xy, TABLE_TOP + scene.cube_half_size + PLACEMENT_GAP)
            qpos[address + 3 : address + 7] = (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
        self.gripper_command = 0.0
        self._rest = qpos[self._arm_qpos].copy()
        mujoco.mj_forward(self.model, self.data)

    def control_step(self, action: np.ndarray) -> None:
        """One control step (50 ms at 20 Hz) of an action (7,) in [-1, 1]."""
        model, data, layout = self.model, self.data, self.compiled.layout
        self._move_gripper(action[6])
        jacobian, mass = self._jacobian[:, self._arm_qvel], self._mass[self._arm_qvel, self._arm_qvel]
        position_jacobian, rotation_jacobian = self._jacobian[:3], self._jacobian[3:]
        grip, state = np.empty(12), np.zeros((6, len(layout.arm_qpos)))
        state[3], state[4, :6], state[5, :6] = self._rest, layout.kp, layout.kd
        for substep in range(self._substeps):
            mujoco.mj_step1(model, data)
            mujoco.mj_jacSite(model, data, position_jacobian, rotation_jacobian, layout.grip_site)
            self._full_mass(model, data, self._mass)
            grip[:3], grip[3:] = self._grip
            state[0], state[1], state[2] = self._arm_state
            if substep == 0:
                goal = controller.goal_pose(action[:6], self._scale, grip, self._origin())
            torque = controller.arm_torque(goal, grip, jacobian, mass, state)
            np.clip(torque, self._arm_low, self._arm_high, out=self._control)
            mujoco.mj_step2(model, data)

    def update_pose(self) -> None:
        """Bring poses and cameras up to date (a step leaves them one substep behind the state); physics are not touched."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def proprioception(self) -> np.ndarray:
        """(P,) float32, see `sim.environment.PROPRIOCEPTION`. Call `update_pose` first."""
        layout, data = self.compiled.layout, self.data
        position = data.site_xpos[layout.grip_site] - (0.0, 0.0, TABLE_TOP)
        rotation = data.site_xmat[layout.grip_site].reshape(3, 3)
        fingers = data.qpos[list(layout.gripper_qpos)]
        mujoco.mj_jacSite(self.model, data, self._jacobian[:3], self._jacobian[3:], layout.grip_site)
        velocity = self._jacobian[:3] @ data.qvel
        parts = (position, rotation[:, 0], rotation[:, 1], fingers, [self.gripper_command], velocity)
        return np.concatenate(parts).astype(np.float32)

    def objects(self) -> np.ndarray:
        """(O,) float32 privileged cube poses in the order of `Scene.cubes`, see `sim.environment.OBJECT`."""
        rows = []
        for index in range(len(self.compiled.layout.cube_qpos)):
            position, yaw = self.cube_pose(index)
            rows.extend([*(position - (0.0, 0.0, TABLE_TOP)), np.cos(4 * yaw), np.sin(4 * yaw)])
        return np.array(rows, dtype=np.float32)

    def goal_from_grip(self, color: str) -> np.ndarray:
        """(G,) float32 privileged: the goal cube as the grip has it, see `sim.environment.GOAL`. Call `update_pose` first."""
        position, yaw = self.cube_pose(self.compiled.task.scene.cubes.index(color))
        grip, rotation = self.grip_pose()
        gap = position - grip
        turn = 4.0 * (yaw - np.arctan2(rotation[1, 0], rotation[0, 0]))
        parts = (gap, rotation[:, :2].T @ gap, [np.linalg.norm(gap[:2]), position[2] - TABLE_TOP, np.cos(turn), np.sin(turn)])
        return np.concatenate(parts).astype(np.float32)

    def cube_pose(self, index: int) -> tuple[np.ndarray, float]:
        """World position (3,) of a cube's centre, and its yaw in radians."""
        address = self.compiled.layout.cube_qpos[index]
        w, x, y, z = self.data.qpos[address + 3 : address + 7]
        yaw = float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))
        return self.data.qpos[address : address + 3].copy(), yaw

    def grip_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """World position (3,) and rotation (3, 3) of the grip site. Call `update_pose` first."""
        site = self.compiled.layout.grip_site
        return self.data.site_xpos[site].copy(), self.data.site_xmat[site].reshape(3, 3).copy()

    def lifted(self, color: str) -> bool:
        """Whether the centre of that cube is more than `Task.lift_height` above the table top."""
        task = self.compiled.task
        height = self.data.qpos[self.compiled.layout.cube_qpos[task.scene.cubes.index(color)] + 2]
        return bool(height > TABLE_TOP + task.lift_height)

    def unstable(self) -> bool:
        """Whether the state is no physics any more, or MuJoCo has silently restarted the simulation since the last reset."""
        data = self.data
        if any(data.warning[kind].number > 0 for kind in _RESTARTS):
            return True
        finite = np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()
        return not finite or bool(np.abs(data.qvel).max() > LARGEST_SPEED)

    def state(self) -> State:
        """A copy of everything the future depends on."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, physics, kind)
        return State(physics, self.gripper_command, self._rest.copy())

    def set_state(self, state: State) -> None:
        """Continue from a state of any simulation of the same model; the future is bit-identical."""
        mujoco.mj_setState(self.model, self.data, state.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        self.gripper_command = state.gripper_command
        self._rest = state.rest.copy()

    def _move_gripper(self, command: float) -> None:
        """robosuite's PandaGripper: the commanded opening moves by a fixed speed in the direction of the command's sign."""
        layout = self.compiled.layout
        self.gripper_command = float(np.clip(self.gripper_command + layout.gripper_speed * np.sign(command), -1.0, 1.0))
        low, high = self._gripper_range.T
        sides = np.array([-1.0, 1.0]) * self.gripper_command
        self.data.ctrl[list(layout.gripper_actuators)] = 0.5 * (low + high) + 0.5 * (high - low) * sides

    def _origin(self) -> np.ndarray:
        """(12,) world pose of the robot's base, the frame of the actions."""
        site = self.compiled.layout.origin_site
        return np.concatenate([self.data.site_xpos[site], self.data.site_xmat[site]])


def _span(indices: tuple[int, ...]) -> slice:
    """Consecutive indices as a slice, so that views stay views."""
    first = indices[0]
    assert indices == tuple(range(first, first + len(indices))), indices
    return slice(first, first + len(indices))


def _full_mass_function() -> Callable[[mujoco.MjModel, mujoco.MjData, np.ndarray], None]:
    """`mj_fullM(model, data, out)`; MuJoCo before 3.10 took the sparse matrix last."""
    if tuple(int(part) for part in mujoco.__version__.split(".")[:2]) >= (3, 10):
        return mujoco.mj_fullM
    return lambda model, data, out: mujoco.mj_fullM(model, out, data.qM)
