"""The lean step follows stock robosuite, and its small solvers give known answers."""

import mujoco
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from sim import controller
from sim.lifting import LiftExpert
from sim.model import load_model, stock_environment
from sim.simulation import Simulation, State


@pytest.fixture(scope="module")
def stock(task):
    environment = stock_environment(task)
    environment.reset()
    return environment


def set_stock(stock, state):
    """Put a stock environment into a recorded state, its controllers too."""
    model, data = stock.sim.model._model, stock.sim.data._data
    mujoco.mj_setState(model, data, state.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
    robot = stock.robots[0]
    arm = robot.part_controllers["right"]
    arm.initial_joint, arm.new_update = state.rest.copy(), True
    robot.gripper["right"].current_action = np.array([-1.0, 1.0]) * state.gripper_command


def largest_difference(stock, simulation, actions):
    differences = []
    for action in actions:
        stock.step(action)
        simulation.control_step(action)
        differences.append(np.abs(stock.sim.data.qpos - simulation.data.qpos).max())
    return max(differences)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_eight_free_control_steps_equal_stock_robosuite(stock, simulation, seed):
    generator = np.random.default_rng(seed)
    simulation.reset(seed)
    for action in generator.uniform(-1, 1, (5, 7)):
        simulation.control_step(action)
    set_stock(stock, simulation.state())
    assert largest_difference(stock, simulation, generator.uniform(-1, 1, (8, 7))) < 1e-6


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_control_steps_in_contact_equal_stock_robosuite(stock, simulation, seed):
    simulation.reset(seed)
    expert = LiftExpert(simulation, "red")
    while simulation.gripper_command < 0.2:  # the fingers are closing on the cube
        simulation.update_pose()
        simulation.control_step(expert.act())
        assert simulation.data.time < 3.0
    actions = np.random.default_rng(seed).uniform(-0.5, 0.5, (8, 7))
    actions[:, 2], actions[:, 6] = 0.5, 1.0
    set_stock(stock, simulation.state())
    assert simulation.data.ncon > 8
    assert largest_difference(stock, simulation, actions) < 1e-6


def test_decimated_meshes_leave_the_physics_bit_identical(task, simulation):
    full = Simulation(load_model(task, full=True))
    assert simulation.model.nmeshface < 0.25 * full.model.nmeshface
    for each in (simulation, full):
        each.reset(3)
    for action in np.random.default_rng(3).uniform(-1, 1, (40, 7)):
        simulation.control_step(action)
        full.control_step(action)
    assert simulation.data.qpos.tobytes() == full.data.qpos.tobytes()


def test_state_continues_bit_identically_in_another_simulation(stage, simulation):
    other = Simulation(stage.compiled)
    other.reset(8)
    other.control_step(np.ones(7))
    simulation.reset(4)
    actions = np.random.default_rng(4).uniform(-1, 1, (10, 7))
    for action in actions[:5]:
        simulation.control_step(action)
    state = simulation.state()
    assert isinstance(state, State)
    other.set_state(state)
    for action in actions[5:]:
        simulation.control_step(action)
        other.control_step(action)
    assert simulation.data.qpos.tobytes() == other.data.qpos.tobytes()


def test_solver_gives_the_known_answer():
    matrix = np.array([[4.0, 2.0, 0.0], [2.0, 5.0, 3.0], [0.0, 3.0, 6.0]])
    assert np.allclose(controller.solve_positive(matrix, matrix @ [1.0, -2.0, 3.0]), [1.0, -2.0, 3.0], atol=1e-12)


def test_solver_gives_no_force_in_a_vanishing_direction():
    matrix = np.diag([2.0, 0.0, 4.0])
    assert np.array_equal(controller.solve_positive(matrix, np.array([2.0, 7.0, 4.0])), [1.0, 0.0, 1.0])


def test_rotation_of_a_vector_equals_scipy():
    for vector in ([0.3, -0.2, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, np.pi / 2]):
        assert np.allclose(controller.rotation_of(np.array(vector)), Rotation.from_rotvec(vector).as_matrix(), atol=1e-12)


def test_orientation_error_is_the_sine_of_the_angle_about_the_axis():
    goal = Rotation.from_rotvec([0.0, 0.0, 0.4]).as_matrix().reshape(9)
    assert np.allclose(controller.orientation_error(goal, np.eye(3).reshape(9)), [0.0, 0.0, np.sin(0.4)], atol=1e-12)
