"""Keyframes: their names, what is drawn from a buffer, what was recorded there, and branches of one decision."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from wmrl.buffer import Buffer
from wmrl.collect import collect, expand
from wmrl.keyframes import Keyframes, branches, decisions_before, keyframe, observations, place_of
from wmrl.noise import uniforms
from wmrl.toy import ChainWorld
from wmrl.types import Rollouts, Start, Status

WORLD = ChainWorld()
START = Start("lift_cube", 12, "lift the red cube", split="train")


def played(*, imagined: bool = False, seed: int = 0) -> Rollouts:
    """Eight groups of four in the corridor; real ones end with their success, so that decisions differ in number."""
    rows, members = expand(WORLD.starts(seed, 8), 4)
    environment = WORLD.imagination().environment() if imagined else WORLD.environment()
    return collect(environment, WORLD.policy(), rows, members, seed=seed)


@pytest.fixture
def buffer() -> Buffer:
    buffer = Buffer()
    buffer.add(played(seed=0))
    buffer.add(played(seed=1))
    return buffer


def places(starts: Sequence[Start]) -> list[tuple[int, int]]:
    found = [place_of(start) for start in starts]
    return [place for place in found if place is not None]


def test_the_name_of_a_keyframe_holds_its_place_and_its_scene() -> None:
    named = keyframe(START, 103, 2)
    assert place_of(named) == (103, 2) and place_of(START) is None
    assert place_of(Start("lift_cube", 12, snapshot="some other kind")) is None
    assert (named.task, named.seed, named.instruction, named.split) == ("lift_cube", 12, "lift the red cube", "train")
    assert keyframe(named, 5, 1) == keyframe(START, 5, 1)  # a keyframe's own start may be one


def test_decisions_before_count_from_the_episode() -> None:
    before = decisions_before([keyframe(START, 9, 3), START, keyframe(START, 4, 0)])
    assert before.tolist() == [3, 0, 0] and before.dtype == torch.long


def test_every_keyframe_is_a_group_of_its_own() -> None:
    """1:23 and 12:3 would be one name if row and decision were joined without a mark."""
    different = [START, *(keyframe(START, row, decision) for row, decision in ((0, 0), (0, 1), (1, 0), (1, 23), (12, 3)))]
    assert len({start.group_key for start in different}) == len({start.scene_hash for start in different}) == 6
    noise = uniforms(0, different, [0] * 6, 0, 8)
    assert len({tuple(row) for row in noise.tolist()}) == 6


def test_a_draw_is_keyed_by_seed_step_and_block(buffer: Buffer) -> None:
    keys = list(itertools.product((0, 1), repeat=3))
    drawn = {(seed, step, block): Keyframes(buffer, seed)(step, block, 12) for seed, step, block in keys}
    assert len(set(drawn.values())) == 8
    again = Keyframes(buffer, 1)
    again(3, 3, 5)  # an earlier draw leaves nothing behind
    assert again(0, 1, 12) == drawn[1, 0, 1]
    assert set(again(0, 1, 5)) < set(drawn[1, 0, 1])


def test_keyframes_are_different_decisions_that_were_taken(buffer: Buffer) -> None:
    mask = buffer.all().mask
    assert 64 < int(mask.sum()) < mask.numel()  # some rollouts ended early
    for block in range(20):
        starts = Keyframes(buffer, 0)(0, block, 30)
        found = places(starts)
        assert len(found) == len(set(found)) == len({start.group_key for start in starts}) == 30
        assert all(mask[place] == 1 for place in found)
        assert all(start == keyframe(buffer.all().starts[row], row, decision) for start, (row, decision) in zip(starts, found))


def test_keyframes_near_the_deadline_come_first_so_that_waves_can_stop_early(buffer: Buffer) -> None:
    before = decisions_before(Keyframes(buffer, 0)(0, 0, 10_000)).tolist()
    assert before == sorted(before, reverse=True) and (before[0], before[-1]) == (3, 0)


def test_asking_for_more_than_there_is_gives_every_taken_decision_once(buffer: Buffer) -> None:
    found = places(Keyframes(buffer, 0)(0, 0, 10_000))
    assert sorted(found) == [tuple(place) for place in torch.nonzero(buffer.all().mask).tolist()]


def test_later_rollouts_are_drawn_as_soon_as_they_are_in_the_buffer(buffer: Buffer) -> None:
    keyframes = Keyframes(buffer, 0)
    assert {row for row, _ in places(keyframes(0, 0, 10_000))} == set(range(64))
    buffer.add(played(seed=2))
    assert {row for row, _ in places(keyframes(0, 0, 10_000))} == set(range(96))


def test_observations_are_what_was_recorded_at_the_place(buffer: Buffer) -> None:
    rollouts = buffer.all()
    starts = Keyframes(buffer, 0)(0, 0, 25)
    seen = observations(rollouts, starts, ["index"])
    assert list(seen) == ["index"]
    assert seen["index"].tolist() == [rollouts.inputs["index"][row, decision].item() for row, decision in places(starts)]
    # the corridor numbers its observations by time first, so the decision can be read off
    assert (seen["index"] // WORLD.num_states).tolist() == decisions_before(starts).tolist()


def test_a_branch_is_the_first_decision_with_the_whole_return() -> None:
    imagined = played(imagined=True)
    short = branches(imagined)
    assert short.rewards.shape == short.mask.shape == (32, 1) and (short.mask == 1).all()
    assert (imagined.mask[:, 1:] > 0).all() and (imagined.rewards[:, 1:] > 0).any()
    assert torch.equal(short.returns(), imagined.returns())
    for name in ("actions", "log_probs", "token_mask"):
        assert torch.equal(getattr(short, name), getattr(imagined, name)[:, :1]), name
    assert torch.equal(short.inputs["index"], imagined.inputs["index"][:, :1])
    assert short.starts == imagined.starts and torch.equal(short.member, imagined.member) and short.imagined
    assert torch.equal(short.status, imagined.status) and short.num_decisions() == 32
    assert short.status.tolist() == [Status.TIME_LIMIT] * 32
