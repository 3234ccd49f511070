"""A scripted expert that lifts the goal cube from privileged poses, and the ways in which it can be made to fail on purpose.

Almost stateless: the command is a function of poses and of whether the fingers are closing, so that a policy can imitate it.
"""

from __future__ import annotations

import numpy as np

from sim.perturbations import Perturbation
from sim.simulation import Simulation

POSITION_GAIN = 40.0
"""Action per metre of position error: full speed from 2.5 cm on."""
ROTATION_GAIN = 4.0
"""Action per radian of orientation error."""
FUNNEL_SLOPE = 3.0
FUNNEL_MOUTH = 0.08
FUNNEL_TOLERANCE = 0.01
"""The grip comes down inside a funnel: its height above the cube is at most slope x (misalignment - tolerance), metres."""
YAW_LENGTH = 0.03
"""Metres of misalignment that one radian of wrong yaw counts for."""
GRASP_RADIUS = 0.015
LOST_RADIUS = 0.035
CLOSED_COMMAND = 0.25
"""Commanded opening at which the fingers hold a 4 cm cube and the lift begins."""
NEIGHBOUR_RANGE = 0.12
"""Other cubes nearer than this make the expert prefer the grasp whose fingers do not point at them."""


class LiftExpert:
    """Approach, align, close, lift. One expert serves one episode."""

    def __init__(self, simulation: Simulation, goal: str, perturbation: Perturbation | None = None) -> None:
        self._simulation = simulation
        self._perturbation = perturbation or Perturbation()
        cubes = simulation.compiled.task.scene.cubes
        aimed = cubes.index(goal)
        if self._perturbation.wrong_cube and len(cubes) > 1:
            aimed = (aimed + 1) % len(cubes)
        self._aimed = aimed
        self._others = [index for index in range(len(cubes)) if index != aimed]
        self._closing = False
        self._waited = 0
        self._attempt = 0

    def memory(self) -> tuple[bool, int, int]:
        """What the expert remembers, for `recall` when an imagined future is taken back."""
        return self._closing, self._waited, self._attempt

    def recall(self, memory: tuple[bool, int, int]) -> None:
        """Restore `memory`."""
        self._closing, self._waited, self._attempt = memory

    def act(self) -> np.ndarray:
        """(7,) commanded action in [-1, 1] for the state of now. `Simulation.update_pose` must have been called."""
        grip, rotation = self._simulation.grip_pose()
        cube, cube_yaw = self._simulation.cube_pose(self._aimed)
        target = cube + self._offset()
        heading = float(np.arctan2(rotation[1, 0], rotation[0, 0]))
        turn = self._turn(heading, cube, cube_yaw)
        action = np.empty(7)
        error = target - grip
        self._update_closing(error)
        if self._closing and self._simulation.gripper_command >= CLOSED_COMMAND:
            error = np.array([0.0, 0.0, 1.0])
        elif not self._closing:
            sideways = float(np.linalg.norm(error[:2]))
            misaligned = sideways + YAW_LENGTH * abs(turn) - FUNNEL_TOLERANCE
            error[2] += np.clip(FUNNEL_SLOPE * misaligned, 0.0, FUNNEL_MOUTH)
        action[:3] = POSITION_GAIN * error
        action[3:6] = ROTATION_GAIN * _rotation_error(rotation, heading + turn)
        action[6] = 1.0 if self._closing else -1.0
        return np.clip(action, -1.0, 1.0)

    def _offset(self) -> np.ndarray:
        offsets = self._perturbation.offsets
        return offsets[self._attempt] if self._attempt < len(offsets) else np.zeros(3)

    def _update_closing(self, error: np.ndarray) -> None:
        """Close at the target; give up and open again when the cube is no longer between the fingers."""
        if self._closing:
            if np.linalg.norm(error) > LOST_RADIUS + self._perturbation.close_early:
                self._closing, self._waited = False, 0
                self._attempt += 1
            return
        near = np.linalg.norm(error[:2]) < GRASP_RADIUS and abs(error[2]) < GRASP_RADIUS + self._perturbation.close_early
        if near:
            self._waited += 1
            self._closing = self._waited > self._perturbation.close_late

    def _turn(self, heading: float, cube: np.ndarray, cube_yaw: float) -> float:
        """Signed angle to the better of the two grasps of a cube: little turning, fingers clear of the other cubes."""
        nearest = _wrap(cube_yaw - heading, np.pi / 2)
        other = nearest - np.sign(nearest) * np.pi / 2 if nearest else np.pi / 2
        return min((nearest, other), key=lambda turn: self._grasp_cost(turn, heading + turn, cube))

    def _grasp_cost(self, turn: float, heading: float, cube: np.ndarray) -> float:
        cost = abs(turn)
        for index in self._others:
            gap = self._simulation.cube_pose(index)[0][:2] - cube[:2]
            distance = float(np.linalg.norm(gap))
            along_fingers = abs(gap @ (np.cos(heading), np.sin(heading))) / max(distance, 1e-6)
            cost += 2.0 * along_fingers**2 * max(0.0, 1.0 - distance / NEIGHBOUR_RANGE)
        return cost


def _rotation_error(rotation: np.ndarray, heading: float) -> np.ndarray:
    """(3,) rotation vector (small angles) to the grip that points straight down with that heading of its x axis."""
    x = np.array([np.cos(heading), np.sin(heading), 0.0])
    z = np.array([0.0, 0.0, -1.0])
    wanted = np.stack([x, np.cross(z, x), z], axis=1)
    return 0.5 * np.cross(rotation.T, wanted.T).sum(axis=0)


def _wrap(angle: float, period: float) -> float:
    """The equivalent angle in [-period/2, period/2)."""
    return (angle + period / 2) % period - period / 2
