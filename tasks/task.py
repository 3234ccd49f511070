"""A task as a value: goals told apart by instruction, the scene, the robot, the time limit. `get_task` looks one up by name.

This file imports neither torch nor a simulator, so that light worker processes can use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

ROBOTS = ("Panda",)
CAMERAS = ("agentview", "wrist")


@dataclass(frozen=True)
class Scene:
    """Cubes on a table, drawn anew for every seed.

    cubes            colour of each cube, in the order of the `objects` observation
    half_width       cube centres are uniform in [-half_width, half_width]^2 around the table centre, metres
    minimum_distance smallest distance between two cube centres, metres
    joint_noise      standard deviation of the robot's initial joint angles, radians
    cube_half_size   half the edge of a cube, metres
    """

    cubes: tuple[str, ...] = ("red", "green")
    half_width: float = 0.10
    minimum_distance: float = 0.07
    joint_noise: float = 0.02
    cube_half_size: float = 0.02

    def __post_init__(self) -> None:
        if not self.cubes or len(set(self.cubes)) != len(self.cubes):
            raise ValueError(f"expected at least one cube, each colour once, got {self.cubes}")
        if self.minimum_distance > 1.5 * self.half_width:
            raise ValueError(
                f"expected cubes that fit: minimum_distance at most 1.5 x half_width = {1.5 * self.half_width:g} m, "
                f"got {self.minimum_distance:g} m"
            )


@dataclass(frozen=True)
class Task:
    """What is to be done.

    goals              (goal name, instruction) pairs; a goal of the lifting tasks is the colour of the cube to lift
    horizon            time limit of a policy in control steps
    demonstration_horizon  time limit of a demonstration: an operator may be slower than the task allows
    control_frequency  control steps per simulated second
    lift_height        the goal cube's centre must rise above the table top by more than this, metres
    """

    name: str
    goals: tuple[tuple[str, str], ...]
    scene: Scene = field(default_factory=Scene)
    horizon: int = 40
    demonstration_horizon: int = 64
    control_frequency: int = 20
    cameras: tuple[str, ...] = CAMERAS
    robot: str = "Panda"
    lift_height: float = 0.04

    def __post_init__(self) -> None:
        require_known("robot", self.robot, ROBOTS)
        for camera in self.cameras:
            require_known("camera", camera, CAMERAS)
        for goal, _ in self.goals:
            require_known("cube", goal, self.scene.cubes)
        if self.horizon < 1 or self.control_frequency < 1:
            raise ValueError(f"expected a positive horizon and frequency, got {self.horizon} and {self.control_frequency}")

    def goal_of(self, instruction: str) -> str:
        """The goal that an instruction names; ValueError for an instruction the task does not have."""
        instructions = {text: goal for goal, text in self.goals}
        require_known("instruction", instruction, tuple(instructions))
        return instructions[instruction]

    def num_decisions(self, chunk: int) -> int:
        """Chunks of `chunk` control steps until the time limit; ValueError when a chunk does not fit."""
        if not 1 <= chunk <= self.horizon:
            raise ValueError(
                f"expected a chunk of 1 to {self.horizon} control steps (the horizon of {self.name!r}), got {chunk}: "
                "choose a shorter chunk"
            )
        return -(-self.horizon // chunk)


def require_known(kind: str, name: str, known: Sequence[str]) -> None:
    """ValueError that names the nearest valid choice."""
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    article = "an" if kind[0] in "aeiou" else "a"
    raise ValueError(f"expected {article} {kind} out of {sorted(known)}, got {name!r}: did you mean {nearest[0]!r}?")


TASKS: tuple[Task, ...] = (
    Task("lift_cube", goals=(("red", "lift the red cube"), ("green", "lift the green cube"))),
    Task("lift_single", goals=(("red", "lift the red cube"),), scene=Scene(cubes=("red",))),
)


def get_task(name: str) -> Task:
    """The task of that name; ValueError with the nearest name for an unknown one."""
    require_known("task", name, [task.name for task in TASKS])
    return next(task for task in TASKS if task.name == name)
