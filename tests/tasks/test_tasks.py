"""Tasks and starts: names, pools, frozen manifests and the leak check."""

import json

import pytest

from tasks import starts as starts_module
from tasks.starts import (
    FROZEN,
    POOLS,
    check_no_leak,
    content_hash,
    load_manifest,
    make_starts,
    manifest_text,
    swap_instructions,
)
from tasks.task import TASKS, Scene, Task, get_task
from wmrl.types import Start


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'lift_cube'"):
        get_task("lift_cubes")


def test_unknown_robot_camera_and_instruction_are_refused():
    with pytest.raises(ValueError, match="expected a robot out of .*'Panda'.*, got 'Sawyer'"):
        Task("x", goals=(("red", "lift"),), robot="Sawyer")
    with pytest.raises(ValueError, match="expected a camera .* got 'wirst': did you mean 'wrist'"):
        Task("x", goals=(("red", "lift"),), cameras=("wirst",))
    with pytest.raises(ValueError, match="did you mean 'lift the red cube'"):
        get_task("lift_cube").goal_of("lift the read cube")


def test_scene_whose_cubes_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="minimum_distance at most"):
        Scene(half_width=0.02, minimum_distance=0.07)


@pytest.mark.parametrize(("chunk", "decisions"), [(8, 5), (7, 6), (40, 1), (1, 40)])
def test_number_of_decisions_covers_the_horizon(chunk, decisions):
    assert get_task("lift_cube").num_decisions(chunk) == decisions


@pytest.mark.parametrize("chunk", [0, 41])
def test_chunk_that_does_not_fit_the_horizon_is_refused(chunk):
    with pytest.raises(ValueError, match="expected a chunk of 1 to 40 control steps"):
        get_task("lift_cube").num_decisions(chunk)


def test_pools_are_disjoint():
    seeds = [set(pool) for pool in POOLS.values()]
    assert sum(len(pool) for pool in seeds) == len(set.union(*seeds)) == 1_001_600


def test_starts_alternate_goals_and_continue_at_an_offset():
    starts = make_starts("lift_cube", "train", 5)
    assert [s.instruction for s in starts] == ["lift the red cube", "lift the green cube"] * 2 + ["lift the red cube"]
    assert make_starts("lift_cube", "train", 2, offset=3) == starts[3:]
    assert len({s.scene_hash for s in starts}) == 5


def test_more_starts_than_a_pool_holds_are_refused():
    with pytest.raises(ValueError, match="at most 1200 starts of split 'test'"):
        make_starts("lift_cube", "test", 1201)


@pytest.mark.parametrize("task", [task.name for task in TASKS])
@pytest.mark.parametrize("split", FROZEN)
def test_manifest_is_frozen_and_equals_the_rule_that_made_it(task, split):
    manifest = load_manifest(task, split)
    assert list(manifest.starts) == make_starts(task, split, len(POOLS[split]))
    assert json.loads(manifest_text(task, split))["content_hash"] == manifest.content_hash == content_hash(manifest.starts)


def test_manifest_of_the_test_starts_never_changes():
    assert load_manifest("lift_cube", "test").content_hash[:16] == "7d2f5ec8a53832f9"


def test_edited_manifest_is_refused(tmp_path, monkeypatch):
    (tmp_path / "manifests").mkdir()
    edited = manifest_text("lift_cube", "test").replace("[2000000,", "[7,")
    (tmp_path / "manifests" / "lift_cube.test.json").write_text(edited)
    monkeypatch.setattr(starts_module.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="match its content hash"):
        load_manifest("lift_cube", "test")


def test_training_start_in_a_test_manifest_is_found_whatever_its_split_or_instruction():
    manifest = load_manifest("lift_cube", "test")
    check_no_leak(make_starts("lift_cube", "train", 500), manifest)
    disguised = Start("lift_cube", 2_000_003, "lift the red cube", split="train")
    with pytest.raises(ValueError, match="1 that are in it .first: seed 2000003."):
        check_no_leak([*make_starts("lift_cube", "train", 3), disguised], manifest)


def test_swapped_instruction_keeps_the_scene():
    starts = make_starts("lift_cube", "validation", 2)
    swapped = swap_instructions(starts)
    assert [s.instruction for s in swapped] == ["lift the green cube", "lift the red cube"]
    assert [s.scene_hash for s in swapped] == [s.scene_hash for s in starts]
