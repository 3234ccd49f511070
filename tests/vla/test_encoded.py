"""A camera world that speaks features: what the policy would encode itself, true goals, each start rendered once, and keyframes
not at all."""

from collections.abc import Sequence

import pytest
import torch

from sim.real import RealEnvironment
from tasks.starts import make_starts
from tasks.task import get_task
from vla.encoded import Beginnings, EncodedEnvironment
from vla.evaluation import told_the_other_goal
from vla.policy import ENCODED, ChunkPolicy
from wmrl.buffer import Buffer
from wmrl.keyframes import keyframe
from wmrl.types import Environment, Observation, Rollouts, Start, Status

READ = ("features", "proprio", "language")
ENTERED = (*ENCODED, "goal")
"""What a world model reads that may know the goal."""
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
    expected = {name: torch.cat([wave[name] for wave in fresh])[:6] for name in ENTERED}
    waves: list[int] = []
    reset = real.reset

    def counted(starts: Sequence[Start]) -> Observation:
        waves.append(len(starts))
        return reset(starts)

    monkeypatch.setattr(real, "reset", counted)
    beginnings = Beginnings(world, names=ENTERED)
    order = [5, 0, 5, 3, 1, 2, 4]  # other rows and other companions than in `fresh`, one start twice
    observation = beginnings([STARTS[i] for i in order])
    assert tuple(observation) == ENTERED and tuple(Beginnings(world)(STARTS[:4])) == ENCODED
    assert all(torch.equal(observation[name], expected[name][order]) for name in ENTERED)
    assert waves == [4, 4, 4] and beginnings.num_resets == 6
    again = beginnings(STARTS)
    assert all(torch.equal(again[name], expected[name]) for name in ENTERED)
    assert waves == [4, 4, 4] and beginnings.num_resets == 6


def recorded(rows: int, decisions: int) -> Rollouts:
    """Rollouts that ran to the end, with random observations."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(rows, decisions, 3, generator=generator) for name in (*ENTERED, "objects")}
    zeros = torch.zeros(rows, decisions)
    return Rollouts(
        starts=tuple(STARTS[:rows]),
        member=torch.zeros(rows, dtype=torch.long),
        actions=zeros[..., None],
        inputs=inputs,
        final={name: values[:, -1] for name, values in inputs.items()},
        log_probs=zeros[..., None],
        token_mask=torch.ones(rows, decisions, 1, dtype=torch.bool),
        rewards=zeros,
        mask=torch.ones(rows, decisions),
        status=torch.full((rows,), int(Status.TIME_LIMIT)),
        seconds=torch.zeros(rows),
    )


def test_keyframes_come_from_the_newest_buffer_and_nothing_is_rendered(
    world: EncodedEnvironment, real: RealEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "reset", lambda starts: pytest.fail("a keyframe was rendered"))
    buffer, rollouts = Buffer(), recorded(4, 3)
    beginnings = Beginnings(world, names=ENTERED, buffer=buffer)
    buffer.add(rollouts[:2])
    buffer.add(rollouts[2:])
    rows, decisions = [3, 0, 3, 1], [2, 0, 1, 1]
    starts = [keyframe(STARTS[row], row, decision) for row, decision in zip(rows, decisions)]
    observation = beginnings(starts)
    assert tuple(observation) == ENTERED and beginnings.num_resets == 0
    assert all(torch.equal(observation[name], rollouts.inputs[name][rows, decisions]) for name in ENTERED)
