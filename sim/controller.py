"""robosuite's operational-space torque, compiled: the same law, with 3x3 and 6x6 solves instead of pseudo-inverses.

Legend: J (6, 7) Jacobian of the grip site; M (7, 7) arm block of the mass matrix; A = J M^-1 J^T (6, 6);
a pose (12,) is a position and a row-major rotation.
Law (Khatib 1987, as in robosuite 1.5.1 `OperationalSpaceController.run_controller`, decoupled position and orientation):

    torque = J^T [A_pos^-1 f ; A_ori^-1 m] + gravity and Coriolis + (I - J^T A^-1 J M^-1) M a
    f = kp (goal - position) - kd velocity,   m the same for the orientation,   a = 10 (q0 - q) - 2 sqrt(10) qd
"""

from __future__ import annotations

import math

import numba
import numpy as np

NULLSPACE_GAIN = 10.0
VANISHING = 1e-14
"""A pivot below this share of its diagonal element counts as zero."""


@numba.njit(cache=True)
def goal_pose(action: np.ndarray, scale: np.ndarray, grip: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """(12,) goal pose, world: the pose of now and a delta in the base frame (robosuite's goal mode "achieved").

    action (6,) in [-1, 1]; scale (6,) metres and radians; grip, origin (12,) world poses of grip site and robot base
    """
    base = origin[3:].reshape(3, 3)
    goal = np.empty(12)
    goal[:3] = grip[:3] + times(base, (scale[:3] * action[:3]).reshape(3, 1))[:, 0]
    turn = times(times(base, rotation_of(scale[3:] * action[3:])), base.T)
    goal[3:] = times(turn, grip[3:].reshape(3, 3)).reshape(9)
    return goal


@numba.njit(cache=True)
def rotation_of(vector: np.ndarray) -> np.ndarray:
    """(3, 3) rotation by an axis-angle vector (3,), radians (Rodrigues)."""
    angle = math.sqrt(vector[0] ** 2 + vector[1] ** 2 + vector[2] ** 2)
    result = np.eye(3)
    if angle < 1e-12:
        return result
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return result + math.sin(angle) * cross + (1.0 - math.cos(angle)) * times(cross, cross)


@numba.njit(cache=True)
def times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Matrix product by loops: at these sizes quicker than a call of BLAS, and slices need no copies."""
    result = np.zeros((left.shape[0], right.shape[1]))
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            for j in range(right.shape[1]):
                result[i, j] += left[i, k] * right[k, j]
    return result


@numba.njit(cache=True)
def arm_torque(goal: np.ndarray, grip: np.ndarray, jacobian: np.ndarray, mass: np.ndarray, state: np.ndarray) -> np.ndarray:
    """(7,) joint torques, N m, not yet clipped; see the file's legend. goal, grip (12,) world poses; state (6, 7), the rows
    bias torques, joint angles, joint speeds, resting angles, kp and kd (the last two with six numbers each)."""
    bias, joints, speeds, rest, kp, kd = state[0], state[1], state[2], state[3], state[4], state[5]
    rest_pull = NULLSPACE_GAIN * (rest - joints) - 2.0 * math.sqrt(NULLSPACE_GAIN) * speeds
    motion = np.stack((speeds, rest_pull), axis=1)
    twist = times(jacobian, motion)  # (6, 2): of the joint speeds, and of the pull to rest
    wanted = np.empty(6)
    error = orientation_error(goal[3:], grip[3:])
    for i in range(3):
        wanted[i] = kp[i] * (goal[i] - grip[i]) - kd[i] * twist[i, 0]
        wanted[3 + i] = kp[3 + i] * error[i] - kd[3 + i] * twist[3 + i, 0]
    inverse_inertia = _task_inverse_inertia(jacobian, mass)
    wrench = np.empty((6, 1))
    wrench[:3, 0] = solve_positive(inverse_inertia[:3, :3], wanted[:3])
    wrench[3:, 0] = solve_positive(inverse_inertia[3:, 3:], wanted[3:])
    wrench[:, 0] -= solve_positive(inverse_inertia, twist[:, 1])
    return times(jacobian.T, wrench)[:, 0] + bias + times(mass, motion[:, 1:])[:, 0]


@numba.njit(cache=True)
def orientation_error(goal: np.ndarray, current: np.ndarray) -> np.ndarray:
    """(3,) half the summed cross products of the frames' axes (robosuite's `orientation_error`); goal, current (9,)."""
    error = np.zeros(3)
    for k in range(3):
        cx, cy, cz = current[k], current[3 + k], current[6 + k]
        gx, gy, gz = goal[k], goal[3 + k], goal[6 + k]
        error[0] += 0.5 * (cy * gz - cz * gy)
        error[1] += 0.5 * (cz * gx - cx * gz)
        error[2] += 0.5 * (cx * gy - cy * gx)
    return error


@numba.njit(cache=True)
def _task_inverse_inertia(jacobian: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """(6, 6) J M^-1 J^T as Y^T D^-1 Y with Y = L^-1 J^T, M = L D L^T."""
    factor = factorise(mass)
    y = jacobian.T.copy()
    for i in range(y.shape[0]):
        for k in range(i):
            y[i] -= factor[i, k] * y[k]
    scaled = y.copy()
    for i in range(y.shape[0]):
        scaled[i] /= factor[i, i]
    return times(y.T, scaled)


@numba.njit(cache=True)
def factorise(matrix: np.ndarray) -> np.ndarray:
    """L D L^T of a symmetric positive definite matrix: D on the diagonal, L below it (what is above means nothing).

    A pivot that vanishes becomes infinite: that direction gets no force, as with robosuite's pseudo-inverse at a singular pose.
    """
    factor = matrix.copy()
    size = matrix.shape[0]
    for j in range(size):
        for k in range(j):
            if factor[k, k] < np.inf:
                factor[j, j] -= factor[j, k] * factor[j, k] * factor[k, k]
        if not factor[j, j] > VANISHING * matrix[j, j]:
            factor[j, j] = np.inf
        for i in range(j + 1, size):
            for k in range(j):
                if factor[k, k] < np.inf:
                    factor[i, j] -= factor[i, k] * factor[j, k] * factor[k, k]
            factor[i, j] /= factor[j, j]
    return factor


@numba.njit(cache=True)
def solve_positive(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve a symmetric positive definite system, see `factorise`."""
    size = right.shape[0]
    factor = factorise(matrix)
    solution = right.copy()
    for i in range(size):
        for k in range(i):
            solution[i] -= factor[i, k] * solution[k]
    for i in range(size - 1, -1, -1):
        solution[i] /= factor[i, i]
        for k in range(i + 1, size):
            solution[i] -= factor[k, i] * solution[k]
    return solution
