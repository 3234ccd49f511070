"""One robot task as a Gymnasium environment: endings, borders, pictures, memory."""

import os
import warnings

import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict
from gymnasium.utils.env_checker import check_env

from sim.environment import RobotTask, Stage, observation_space
from sim.lifting import LiftExpert
from sim.perturbations import Perturbation
from sim.playing import plan_chunk
from sim.simulation import TABLE_TOP

RED, GREEN = {"instruction": "lift the red cube"}, {"instruction": "lift the green cube"}


def play_expert(environment, seed, options, perturbation=None):
    environment.reset(seed=seed, options=options)
    expert = LiftExpert(environment.simulation, environment.goal, perturbation)
    results: list[tuple] = []
    while not results or not (results[-1][2] or results[-1][3]):
        results.append(environment.step(plan_chunk(environment, expert)))
    return results


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gymnasium_checker_passes(environment):
    environment.spec = EnvSpec("RobotTask-v0", entry_point="sim.environment:RobotTask")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*observation space (minimum|maximum) value is (-)?infinity")
        check_env(environment, skip_render_check=False)


def test_success_terminates_with_reward_one(environment):
    for options in (RED, GREEN):
        results = play_expert(environment, 0, options)
        assert [r[1] for r in results] == [0.0] * (len(results) - 1) + [1.0]
        assert results[-1][2:4] == (True, False) and results[-1][4]["is_success"]
        assert results[-1][4]["control_steps"] < 48


def test_chunk_ends_early_at_success(environment):
    last = play_expert(environment, 0, RED)[-1][4]
    assert last["control_steps"] % 8 != 0
    assert environment.simulation.lifted("red")


def test_lifting_the_wrong_cube_is_no_success(environment):
    results = play_expert(environment, 0, RED, Perturbation(wrong_cube=True))
    assert environment.simulation.lifted("green") and not environment.simulation.lifted("red")
    assert sum(r[1] for r in results) == 0.0 and results[-1][2:4] == (False, True)


def test_time_limit_is_truncation_without_reward(environment):
    environment.reset(seed=1)
    results = [environment.step(np.zeros((8, 7))) for _ in range(5)]
    assert [(r[1], r[2], r[3]) for r in results] == [(0.0, False, False)] * 4 + [(0.0, False, True)]
    assert results[-1][4]["status"] == "time_limit" and results[-1][0]["time"] == [1.0]
    with pytest.raises(ValueError, match="expected a running episode, got one that is 'time_limit': call reset"):
        environment.step(np.zeros((8, 7)))


def test_chunk_that_does_not_divide_the_horizon_stops_at_the_horizon(task, stage):
    environment = RobotTask(task, chunk=30, stage=stage)
    environment.reset(seed=1)
    steps = [environment.step(np.zeros((30, 7)))[4]["control_steps"] for _ in range(2)]
    assert steps == [30, 40]


def test_nan_action_names_the_dimension_before_any_physics(environment):
    environment.reset(seed=2)
    before = environment.simulation.state().physics
    actions = np.zeros((8, 7))
    actions[3, 5] = np.nan
    with pytest.raises(ValueError, match=r"got nan in control step 3, dimension 5 \(dyaw\)"):
        environment.step(actions)
    assert environment.simulation.state().physics.tobytes() == before.tobytes()


def test_actions_out_of_range_are_clipped_and_counted(environment):
    actions = np.zeros((8, 7))
    actions[0, 0], actions[4, 2] = 1e9, -3.0
    environment.reset(seed=2)
    observation, *_, info = environment.step(actions)
    assert info["clipped"] == 2
    environment.reset(seed=2)
    same = environment.step(np.clip(actions, -1, 1))[0]
    assert observation["proprio"].tobytes() == same["proprio"].tobytes()


@pytest.mark.parametrize("velocity", [1e12, np.nan, 1e3])
def test_broken_simulation_ends_unstable_with_finite_numbers(environment, velocity, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file
    environment.reset(seed=3)
    environment.simulation.data.qvel[0] = velocity
    observation, reward, terminated, truncated, info = environment.step(np.zeros((8, 7)))
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["status"] == "unstable" and not info["is_success"] and info["control_steps"] < 8
    assert np.isfinite(observation["proprio"]).all() and np.isfinite(observation["objects"]).all()
    environment.reset(seed=3)
    assert environment.step(np.zeros((8, 7)))[4]["status"] == "running"


def test_first_state_and_frame_do_not_depend_on_what_happened_before(environment):
    fresh, _ = environment.reset(seed=7, options=RED)
    frames = {name: picture.copy() for name, picture in fresh["pixels"].items()}
    state = environment.simulation.state().physics
    environment.step(np.ones((8, 7)))
    environment.reset(seed=8)
    np.random.rand(1000)  # noqa: NPY002 (foreign draws from the global generator)
    again, _ = environment.reset(seed=7, options=GREEN)
    assert environment.simulation.state().physics.tobytes() == state.tobytes()
    assert environment.simulation.gripper_command == 0.0
    for name, picture in again["pixels"].items():
        assert picture.tobytes() == frames[name].tobytes()


def test_observations_are_not_overwritten_by_later_steps(environment):
    first, _ = environment.reset(seed=7)
    kept = first["pixels"]["wrist"].copy(), first["proprio"].copy()
    environment.step(np.ones((8, 7)))
    assert np.array_equal(first["pixels"]["wrist"], kept[0]) and np.array_equal(first["proprio"], kept[1])


def test_pictures_are_upright_rgb(environment):
    """The agent view looks at the robot: what is nearer to the robot (smaller x) is higher in the picture."""
    environment.reset(seed=0)
    simulation = environment.simulation
    for red_x, green_x in ((-0.09, 0.09), (0.09, -0.09)):
        for address, x in zip(simulation.compiled.layout.cube_qpos, (red_x, green_x), strict=True):
            simulation.data.qpos[address : address + 3] = (x, 0.0, TABLE_TOP + 0.02)
        simulation.update_pose()
        picture = environment.observe()["pixels"]["agentview"].astype(int)
        assert picture.shape == (64, 64, 3)
        red = np.argwhere(picture[..., 0] - picture[..., 1] > 60)[:, 0].mean()
        green = np.argwhere(picture[..., 1] - picture[..., 0] > 25)[:, 0].mean()
        assert (red < green) == (red_x < green_x)
        assert abs(red - green) > 10


def test_proprioception_and_objects_mean_what_their_names_say(environment):
    observation, _ = environment.reset(seed=11)
    simulation = environment.simulation
    position, yaw = simulation.cube_pose(1)
    wanted = [*(position - (0, 0, TABLE_TOP)), np.cos(4 * yaw), np.sin(4 * yaw)]
    assert np.allclose(observation["objects"][5:], wanted, atol=1e-6)
    environment.step(np.tile([0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0], (8, 1)))
    simulation.update_pose()
    after = environment.observe()["proprio"]
    assert after[2] < observation["proprio"][2] - 0.05 and after[14] < -0.1  # lower, and moving down
    assert after[11] == 1.0 and after[9] < observation["proprio"][9]  # commanded shut, left finger closing
    grip, rotation = simulation.grip_pose()
    assert np.allclose(after[:3], grip - (0, 0, TABLE_TOP), atol=1e-6) and np.allclose(after[3:6], rotation[:, 0], atol=1e-6)


def test_goal_is_the_instructed_cube_as_the_grip_has_it(environment):
    instruction = environment.spec_task.goals[1][1]
    observation, _ = environment.reset(seed=11, options={"instruction": instruction})
    simulation = environment.simulation
    cube, yaw = simulation.cube_pose(1)
    grip, rotation = simulation.grip_pose()
    goal = observation["goal"]
    assert np.allclose(goal[:3], cube - grip, atol=1e-6) and np.isclose(goal[6], cube[2] - TABLE_TOP, atol=1e-6)
    assert np.allclose(
        goal[3] * rotation[:, 0] + goal[4] * rotation[:, 1] + (goal[:3] @ rotation[:, 2]) * rotation[:, 2], goal[:3]
    )
    assert np.isclose(goal[5], np.hypot(goal[0], goal[1]), atol=1e-6)
    turn = 4 * (yaw - np.arctan2(rotation[1, 0], rotation[0, 0]))
    assert np.allclose(goal[7:], [np.cos(turn), np.sin(turn)], atol=1e-6)
    other, _ = environment.reset(seed=11)
    assert not np.allclose(other["goal"][:3], goal[:3]) and np.array_equal(other["objects"], observation["objects"])


def test_observation_space_is_known_without_a_simulator(task):
    space = observation_space(task, 64)
    assert space["pixels"] == Dict({camera: Box(0, 255, (64, 64, 3), np.uint8) for camera in ("agentview", "wrist")})
    assert space["proprio"].shape == (15,) and space["objects"].shape == (10,)
    assert space["goal"].shape == (9,)


def test_resets_with_pictures_do_not_leak_and_a_closed_stage_renders_the_same_again(task, stage):
    environment = RobotTask(task, image_size=128)
    for seed in range(20):
        environment.reset(seed=seed)
    begun = resident_bytes()
    for seed in range(180):
        picture = environment.reset(seed=seed)[0]["pixels"]["agentview"]
    assert resident_bytes() - begun < 100e6
    environment.close()
    again = RobotTask(task, image_size=128)
    assert again.reset(seed=179)[0]["pixels"]["agentview"].tobytes() == picture.tobytes()
    again.close()


def test_video_frames_of_full_quality_show_the_same_scene(environment, stage):
    environment.reset(seed=0)
    fast = stage.video_frame(environment.simulation, "agentview", 128, full=False).astype(int)
    full = stage.video_frame(environment.simulation, "agentview", 128, full=True).astype(int)
    assert fast.shape == full.shape == (128, 128, 3)
    assert np.abs(fast - full).mean() < 12 and not np.array_equal(fast, full)


def test_bad_settings_are_refused_before_any_simulation(task):
    with pytest.raises(ValueError, match="did you mean 'lift_single'"):
        RobotTask("lift_singl")
    with pytest.raises(ValueError, match="expected a chunk of 1 to 40"):
        RobotTask(task, chunk=65)
    with pytest.raises(ValueError, match="image size of at least 8"):
        RobotTask(task, image_size=4)
    with pytest.raises(ValueError, match="expected an instruction out of"):
        RobotTask(task, stage=Stage(task, 64)).reset(seed=0, options={"instruction": "lift the blue cube"})
    with pytest.raises(ValueError, match=r"expected actions of shape \(8, 7\), got \(8, 6\)"):
        environment = RobotTask(task, stage=Stage(task, 64))
        environment.simulation = object()
        environment.step(np.zeros((8, 6)))
