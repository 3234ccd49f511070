"""The scripted expert succeeds, its records are what they claim, and its perturbed episodes fail often enough to teach."""

import numpy as np
import pytest
import torch

from sim.experts import collect_demonstrations, perturbed_rollouts
from sim.lifting import LiftExpert
from sim.perturbations import PERTURBATIONS, draw_perturbation
from tasks.starts import make_starts
from wmrl.types import Status


def lift(simulation, start, task, noise):
    """Control steps until success, or None at the time limit."""
    goal = task.goal_of(start.instruction)
    generator = np.random.default_rng([start.seed, 9])
    simulation.reset(start.seed)
    expert = LiftExpert(simulation, goal)
    for step in range(task.demonstration_horizon):
        simulation.update_pose()
        action = expert.act()
        action[:6] = np.clip(action[:6] + noise * generator.standard_normal(6), -1, 1)
        simulation.control_step(action)
        if simulation.lifted(goal):
            return step + 1
    return None


@pytest.mark.parametrize(("noise", "count", "longest"), [(0.0, 100, 40), (0.2, 50, 64)])
def test_expert_lifts_the_goal_cube_from_98_percent_of_starts(simulation, task, noise, count, longest):
    steps = [lift(simulation, start, task, noise) for start in make_starts(task, "train", count, offset=1000)]
    solved = [s for s in steps if s is not None]
    assert len(solved) >= 0.98 * count
    assert np.mean(solved) < 36 and max(solved) <= longest


def test_demonstrations_hold_one_record_per_control_step_and_repeat(real):
    starts = make_starts("lift_cube", "train", 4, offset=60)
    demonstrations = collect_demonstrations(real, starts, action_noise=0.2, seed=3)
    for start, demonstration in zip(starts, demonstrations, strict=True):
        count = len(demonstration.actions)
        assert demonstration.start == start and demonstration.success and 15 < count < 64
        assert demonstration.pixels["wrist"].shape == demonstration.pixels["agentview"].shape == (count, 64, 64, 3)
        assert demonstration.proprio.shape == (count, 15) and demonstration.objects.shape == (count, 10)
        difference = demonstration.actions - demonstration.expert_actions
        assert np.array_equal(difference[:, 6], np.zeros(count))
        assert 0.1 < difference[:, :6].std() < 0.25
        assert np.abs(demonstration.expert_actions).max() <= 1.0 and demonstration.actions[-1, 6] == 1.0
    again = collect_demonstrations(real, starts[2:], action_noise=0.2, seed=3)
    for first, second in zip(demonstrations[2:], again, strict=True):
        assert first.actions.tobytes() == second.actions.tobytes()
        assert first.pixels["wrist"].tobytes() == second.pixels["wrist"].tobytes()
    other = collect_demonstrations(real, starts[:1], action_noise=0.2, seed=4)
    assert other[0].actions.tobytes() != demonstrations[0].actions.tobytes()


def test_first_record_of_a_demonstration_is_the_first_observation_of_its_start(real):
    starts = make_starts("lift_cube", "train", 1, offset=70)
    demonstration = collect_demonstrations(real, starts, action_noise=0.0, seed=0)[0]
    observation = real.reset(starts)
    assert np.array_equal(observation["pixels/wrist"][0], demonstration.pixels["wrist"][0])
    assert np.array_equal(observation["proprio"][0], demonstration.proprio[0])


def test_executing_recorded_chunks_again_gives_the_recorded_observations_and_outcomes(real):
    starts = make_starts("lift_cube", "train", 4, offset=80)
    rollouts = perturbed_rollouts(real, starts, seed=1)
    real.reset(starts)
    for decision in range(5):
        step = real.step(rollouts.actions[:, decision])
        assert torch.equal(step.reward, rollouts.rewards[:, decision])
        following = rollouts.inputs["proprio"][:, decision + 1] if decision < 4 else rollouts.final["proprio"]
        assert torch.equal(step.observation["proprio"], following)
    assert torch.equal(step.status, rollouts.status)


def test_perturbed_rollouts_are_laid_out_like_policy_rollouts_with_failures_and_successes(real):
    rollouts = perturbed_rollouts(real, make_starts("lift_cube", "train", 16, offset=100), seed=2)
    assert rollouts.actions.shape == (16, 5, 8, 7) and rollouts.actions.abs().max() <= 1.0
    assert rollouts.inputs["pixels/agentview"].shape == (16, 5, 64, 64, 3)
    assert rollouts.final["pixels/agentview"].shape == (16, 64, 64, 3)
    success = rollouts.returns()
    assert 0.05 < success.mean() < 0.9
    assert torch.equal(success == 1.0, rollouts.status == int(Status.SUCCESS))
    assert (rollouts.actions[rollouts.mask == 0] == 0).all()
    assert len(rollouts[:4]) == 4 and not rollouts.imagined and (rollouts.seconds > 0).all()
    assert rollouts.extra["planning_seconds"].shape == (16,) and (rollouts.extra["planning_seconds"] > 0).all()
    wrong = rollouts.extra["perturbation"] == PERTURBATIONS.index("wrong_cube")
    assert wrong.any() and (success[wrong] == 0).all()


def test_mixture_chooses_the_kinds(real):
    rollouts = perturbed_rollouts(real, make_starts("lift_cube", "train", 4), seed=0, mixture={"none": 1.0}, action_noise=0.0)
    assert rollouts.returns().tolist() == [1.0] * 4 and (rollouts.extra["perturbation"] == 0).all()
    with pytest.raises(ValueError, match="did you mean 'near_miss'"):
        perturbed_rollouts(real, make_starts("lift_cube", "train", 1), seed=0, mixture={"near_mis": 1.0})
    with pytest.raises(ValueError, match="at least one perturbation"):
        perturbed_rollouts(real, make_starts("lift_cube", "train", 1), seed=0, mixture={"none": 0.0})
    with pytest.raises(ValueError, match="action noise of 0 to 1"):
        collect_demonstrations(real, make_starts("lift_cube", "train", 1), action_noise=2.0, seed=0)


def test_near_misses_are_one_to_five_centimetres_off():
    generator = np.random.default_rng(0)
    offsets = np.concatenate([draw_perturbation("near_miss", generator).offsets for _ in range(200)])
    radius = np.linalg.norm(offsets[:, :2], axis=1)
    assert radius.min() >= 0.01 and radius.max() <= 0.05 and 0.0 <= offsets[:, 2].min() and offsets[:, 2].max() <= 0.03
    with pytest.raises(ValueError, match="expected a perturbation out of"):
        draw_perturbation("sideways", generator)
