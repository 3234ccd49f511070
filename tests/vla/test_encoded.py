"""A camera world that speaks features: what the policy would encode itself, true goals, and each start rendered once."""

from collections.abc import Sequence

import pytest
import torch

from sim.real import RealEnvironment
from tasks.starts import make_starts
from tasks.task import get_task
from vla.encoded import Beginnings, EncodedEnvironment
from vla.evaluation import told_the_other_goal
from vla.policy import ChunkPolicy
from wmrl.types import Environment, Observation, Start

READ = ("features", "proprio", "language")
INSTRUCTIONS = [text for _, text in get_task("lift_cube").goals]
STARTS = make_starts("lift_cube", "train", 6, offset=300)


@pytest.fixture(scope="module")
def world(real: RealEnvironment, camera_policy: ChunkPolicy) -> EncodedEnvironment:
    return EncodedEnvironment(real, camera_policy)


def test_features_are_those_of_the_raw_observation(
    world: EncodedEnvironment, real: RealEnvironment, camera_policy: ChunkPolicy
) -> None:
    assert isinstance(world, Environment) and not world.imagined
    assert (world.width, world.max_decisions) == (real.width, real.max_decisions)
    actions = torch.rand(4, 8, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = [world.reset(STARTS[:4]), world.step(actions).observation]
    raw = [real.reset(STARTS[:4]), real.step(actions).observation]
    for ours, theirs in zip(seen, raw, strict=True):
        encoded = camera_policy.encode(theirs)
        assert all(torch.equal(ours[name], encoded[name]) for name in READ)
        assert torch.equal(ours["pixels/wrist"], theirs["pixels/wrist"]) and torch.equal(ours["objects"], theirs["objects"])
    assert not torch.equal(seen[0]["features"], seen[1]["features"])


def test_being_told_the_other_goal_changes_only_what_the_policy_reads(
    world: EncodedEnvironment, camera_policy: ChunkPolicy
) -> None:
    swapped = told_the_other_goal(world, INSTRUCTIONS)
    true, told = world.reset(STARTS[:2]), swapped.reset(STARTS[:2])
    assert told["instruction"] == true["instruction"] == INSTRUCTIONS
    assert torch.equal(told["language"], camera_policy.sentences(INSTRUCTIONS[::-1]))
    assert torch.equal(true["language"], camera_policy.sentences(INSTRUCTIONS))
    assert not torch.equal(told["features"], true["features"])
    for name in ("pixels/agentview", "pixels/wrist", "objects", "proprio", "time"):
        assert torch.equal(told[name], true[name]), name


def test_beginnings_equal_a_fresh_reset_and_each_start_is_rendered_once(
    world: EncodedEnvironment, real: RealEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = [world.reset(STARTS[:4]), world.reset(STARTS[4:] * 2)]
    expected = {name: torch.cat([wave[name] for wave in fresh])[:6] for name in READ}
    waves: list[int] = []
    reset = real.reset

    def counted(starts: Sequence[Start]) -> Observation:
        waves.append(len(starts))
        return reset(starts)

    monkeypatch.setattr(real, "reset", counted)
    beginnings = Beginnings(world)
    order = [5, 0, 5, 3, 1, 2, 4]  # other rows and other companions than in `fresh`, one start twice
    observation = beginnings([STARTS[i] for i in order])
    assert all(torch.equal(observation[name], expected[name][order]) for name in READ)
    assert waves == [4, 4] and beginnings.num_resets == 6
    again = beginnings(STARTS)
    assert all(torch.equal(again[name], expected[name]) for name in READ)
    assert waves == [4, 4] and beginnings.num_resets == 6
