"""A kill, a full disk or a half copy costs at most the newest checkpoint, and what comes back is exactly what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wmrl.checkpoint import CheckpointError, load_checkpoint, load_latest, save_checkpoint
from wmrl.state_codec import decode, encode, state_hash


def policy_files(folder: Path) -> None:
    (folder / "config.json").write_text('{"type": "toy"}')


def save(folder: Path, step: int, value: float = 0.0, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, policy_files=policy_files, state={"weight": torch.full((3,), value)}, keep=keep)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_layout_is_lerobots(tmp_path):
    path = save(tmp_path, 12)
    assert path == tmp_path / "checkpoints" / "000012"
    assert json.loads((path / "pretrained_model" / "config.json").read_text()) == {"type": "toy"}
    assert json.loads((path / "training_state" / "training_step.json").read_text()) == {"step": 12}
    assert os.readlink(tmp_path / "checkpoints" / "last") == "000012"
    assert not list(path.rglob("*.pt")) + list(path.rglob("*.pkl"))


def test_nested_state_comes_back_exactly():
    weight = torch.nn.Parameter(torch.randn(3, 2))
    state = {
        "plain": [1, 2.5, True, None, "text", -(2**60), 1e-300, (1, (2.0, "a"))],
        "odd floats": [float("inf"), float("-inf"), float("nan"), -0.0],
        "optimiser": {"state": {0: {"step": torch.tensor(3.0)}, 7: {}}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.99)}]},
        "__odd__": {"__tensor__": "not a tensor"},
        "empty": [{}, [], (), torch.zeros(0, 4), ""],
        "weight": weight,
        "types": [
            torch.ones(2).to(t) for t in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64)
        ],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "shared": [weight, weight],
    }
    tree, tensors = encode(state)
    back = decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)
    assert state_hash(state) == state_hash(back)
    assert isinstance(back["optimiser"]["param_groups"][0]["betas"], tuple) and 7 in back["optimiser"]["state"]
    assert state_hash(state) != state_hash({**back, "plain": [1.0, *back["plain"][1:]]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (True, 1),
        (1, 1.0),
        ((1,), [1]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
    ],
)
def test_the_hash_sees_one_flipped_bit_and_a_changed_type(first, second):
    assert state_hash({"a": first}) != state_hash({"a": second})


def test_the_hash_of_nan_is_stable():
    assert state_hash({"a": torch.tensor(float("nan")), "b": float("nan")}) == state_hash(
        {"a": torch.tensor(float("nan")), "b": float("nan")}
    )


def test_a_saved_slice_does_not_drag_its_storage_along(tmp_path):
    state = {"slice": torch.zeros(1_000_000)[:10]}
    path = save_checkpoint(tmp_path, 1, policy_files=policy_files, state=state)
    assert (path / "training_state" / "state.safetensors").stat().st_size < 1000


@pytest.mark.parametrize("value", [object(), Path("x"), {1, 2}, torch.Size([1])])
def test_a_value_that_would_not_come_back_is_refused_by_its_place(value):
    with pytest.raises(ValueError, match=r"buffer\.0\.odd"):
        encode({"buffer": [{"odd": value}]})


def test_state_round_trip_through_disk(tmp_path):
    state = {"step": 4, "tensors": {"a": torch.randn(2, 3), "b": [torch.tensor(True)]}, "none": None}
    save_checkpoint(tmp_path, 4, policy_files=policy_files, state=state)
    found = load_latest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (4, ()) and state_hash(found.state) == state_hash(state)
    assert (found.pretrained / "config.json").exists()


def test_a_state_without_tensors_can_be_saved(tmp_path):
    save_checkpoint(tmp_path, 0, policy_files=policy_files, state={"a": 1})
    assert load_checkpoint(tmp_path / "checkpoints" / "last").state == {"a": 1}


def test_no_checkpoint_yet_is_none(tmp_path):
    assert load_latest(tmp_path) is None


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty_checkpoint(file: Path) -> None:
    for path in file.parent.parent.rglob("*"):
        if path.is_file():
            path.unlink()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut_in_half, empty_checkpoint, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_the_last_whole_checkpoint_is_taken_and_the_broken_one_named(tmp_path, damage, name):
    save(tmp_path, 1, 1.0)
    broken = save(tmp_path, 2, 2.0)
    damage(broken / "training_state" / name)
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1 and found.state["weight"][0] == 1.0
    assert len(found.skipped) == 1 and str(broken) in found.skipped[0]
    with pytest.raises(CheckpointError, match="000002 is broken"):
        load_checkpoint(broken)
    save(tmp_path, 2, 3.0)
    again = load_latest(tmp_path)
    assert again is not None and (again.step, float(again.state["weight"][0]), again.skipped) == (2, 3.0, ())


def test_only_broken_checkpoints_is_an_error_not_a_fresh_start(tmp_path):
    cut_in_half(save(tmp_path, 1) / "training_state" / "manifest.json")
    with pytest.raises(CheckpointError, match="only broken ones"):
        load_latest(tmp_path)


def test_run_folder_checkpoints_folder_and_every_way_to_name_one_work(tmp_path):
    path = save(tmp_path, 3)
    found = load_latest(tmp_path / "checkpoints")
    assert found is not None and found.step == 3
    assert [load_checkpoint(p).step for p in (path, path / "pretrained_model", path.parent / "last")] == [3, 3, 3]
    with pytest.raises(CheckpointError, match="found nothing at"):
        load_checkpoint(tmp_path / "checkpoints" / "000099")
    with pytest.raises(CheckpointError, match="expected a numbered checkpoint folder"):
        load_checkpoint(tmp_path)


def test_pruning_keeps_the_newest_whole_ones(tmp_path):
    for step in range(5):
        save(tmp_path, step, keep=3)
    assert steps(tmp_path) == ["000002", "000003", "000004", "last"]
    cut_in_half(tmp_path / "checkpoints" / "000004" / "training_state" / "state.safetensors")
    save(tmp_path, 5, keep=3)
    assert steps(tmp_path) == ["000002", "000003", "000005", "last"]  # a broken one does not count as kept


def test_saving_an_earlier_step_abandons_the_later_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    save(tmp_path, 2, 9.0, keep=3)
    assert steps(tmp_path) == ["000001", "000002", "last"]
    assert float(load_checkpoint(tmp_path / "checkpoints" / "000002").state["weight"][0]) == 9.0


def test_a_failing_policy_writer_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, policy_files=fail, state={})
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1 and steps(tmp_path) == ["000001", "last"]


def test_replacing_the_only_checkpoint_is_finished_after_a_kill_between_its_two_renames(tmp_path):
    path = save(tmp_path, 1, 1.0)
    path.rename(tmp_path / "kept")
    new = save(tmp_path, 1, 2.0)
    new.rename(new.with_name(".ready-000001"))
    (tmp_path / "kept").rename(path)
    found = load_latest(tmp_path)
    assert found is not None and float(found.state["weight"][0]) == 2.0


# One process imports torch, then forks a saver for each kill: the fork is a process of its own, and costs no second import.
KILLER = """
import os, signal, sys, time, torch
from pathlib import Path
from wmrl.checkpoint import load_latest, save_checkpoint
torch.set_num_threads(1)
folder = Path(sys.argv[1])

def save_forever(step, report):
    while True:
        step += 1
        state = {"step": step, "weights": [torch.full((20_000,), float(step)) for _ in range(8)]}
        save_checkpoint(folder, step, policy_files=lambda f: (f / "config.json").write_text("{}"), state=state)
        os.write(report, b"x")

step = 0
for kill in range(20):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_forever(step, writer)
    os.close(writer)
    os.read(reader, 1)
    time.sleep(0.002 * kill)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = step + 1 + len(os.read(reader, 10_000))
    found = load_latest(folder)
    assert reported <= found.step <= reported + 1, (reported, found.step)
    assert found.skipped == () and found.state["step"] == found.step
    assert all(bool((w == found.step).all()) for w in found.state["weights"])
    os.close(reader)
    step = found.step
print("survived", kill + 1)
"""


def test_kill_while_saving_loses_at_most_the_step_being_saved(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.stdout == "survived 20\n", done.stderr
