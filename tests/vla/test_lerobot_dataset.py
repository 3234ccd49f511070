"""What the dataset promises: exact frames, complete or absent, and faults named instead of looked up on a hub."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.vla.conftest import make_demonstrations
from vla.lerobot_dataset import check_dataset, read_dataset, read_facts, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "demonstrations"
    write_dataset(root, make_demonstrations((4, 3)), fps=20, robot="panda", names={}, facts={"task": "lift_cube"})
    return root


def test_what_is_read_is_what_was_recorded(dataset: Path) -> None:
    data, again = make_demonstrations((4, 3)), read_dataset(dataset)
    for camera, frames in data.frames.items():
        assert torch.equal(again.frames[camera], frames), camera
    for name in ("proprio", "actions", "objects", "episode"):
        assert torch.equal(getattr(again, name), getattr(data, name)), name
    assert again.instructions == data.instructions and again.seeds == data.seeds
    assert read_facts(dataset)["task"] == "lift_cube"


def test_it_is_a_lerobot_v3_dataset(dataset: Path) -> None:
    info = json.loads((dataset / "meta" / "info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20 and info["total_episodes"] == 2
    assert info["features"]["observation.images.wrist"]["shape"] == [32, 32, 3]


def test_an_existing_dataset_is_not_overwritten(dataset: Path) -> None:
    with pytest.raises(ValueError, match="expected no dataset"):
        write_dataset(dataset, make_demonstrations((2,)), fps=20, robot="panda", names={}, facts={})


def test_missing_and_unfinalised_datasets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no meta/info.json; record one with `wmrl-collect`"):
        check_dataset(tmp_path)
    root = tmp_path / "cut"
    write_dataset(root, make_demonstrations((3,)), fps=20, robot="panda", names={}, facts={})
    file = next((root / "data").rglob("*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not finalised: data/.* is cut off"):
        read_dataset(root)
    file.unlink()
    for episodes in (root / "meta" / "episodes").rglob("*.parquet"):
        episodes.unlink()
    with pytest.raises(ValueError, match="not finalised"):
        read_dataset(root)


@pytest.mark.parametrize("name", ["info.json", "wmrl.json"])
def test_a_broken_description_is_named(dataset: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset, root)
    (root / "meta" / name).write_text('{"codebase_version": ')
    with pytest.raises(ValueError, match=f"expected JSON in .*meta/{name}, got a broken file"):
        read_dataset(root)


def test_a_dataset_without_the_needed_features_is_refused(dataset: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(dataset, root)
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"]["state"] = info["features"].pop("observation.state")
    (root / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"missing \['observation.state'\]"):
        check_dataset(root)
