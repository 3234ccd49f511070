"""Demonstrations as a LeRobot v3 dataset on disk: written once, completely or not at all; checked before it is read.

Frames are stored as images (PNG), not video: at 64 pixels they are small, and stored and live frames are equal to the last bit.
Shape legend: N control steps, S image side, P proprioception, A action dimensions, O object numbers.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla.demonstrations import Demonstrations
from wmrl.files import read_json

REPOSITORY = "local/wmrl-demonstrations"
FACTS = "wmrl.json"
"""Sidecar in meta/: seeds of the starts, task, controller, versions; LeRobot's own info.json stays as LeRobot writes it."""

PROPRIO, ACTION, OBJECTS = "observation.state", "action", "observation.environment_state"


def image_key(camera: str) -> str:
    """LeRobot's name of a camera's frames."""
    return f"observation.images.{camera}"


def write_dataset(
    root: Path, data: Demonstrations, *, fps: int, robot: str, names: Mapping[str, Sequence[str]], facts: dict[str, Any]
) -> None:
    """Write a finalised dataset at `root`. `names` holds the names of the action and state dimensions; `facts` goes to the
    sidecar.

    Written beside the target and renamed at the end, so that a killed recording leaves nothing that looks like a dataset.
    """
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    _quiet()
    if root.exists():
        raise ValueError(f"expected no dataset at {root}, found one; give another folder or remove it")
    partial = root.with_name(f".{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    dataset = LeRobotDataset.create(
        REPOSITORY, fps=fps, features=_features(data, names), root=partial, robot_type=robot, use_videos=False
    )
    episodes = np.asarray(data.episode)
    for episode, instruction in enumerate(data.instructions):
        for row in np.flatnonzero(episodes == episode):
            frame: dict[str, Any] = {image_key(camera): np.asarray(frames[row]) for camera, frames in data.frames.items()}
            frame |= {PROPRIO: np.asarray(data.proprio[row]), ACTION: np.asarray(data.actions[row])}
            dataset.add_frame(frame | {OBJECTS: np.asarray(data.objects[row]), "task": instruction})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    (partial / "meta" / FACTS).write_text(json.dumps({**facts, "seeds": list(data.seeds)}, indent=1))
    os.replace(partial, root)


def _quiet() -> None:
    """One progress bar per episode and a note about an absent video decoder say nothing about image datasets."""
    from datasets import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("lerobot").setLevel(logging.ERROR)


def _features(data: Demonstrations, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    features: dict[str, dict[str, Any]] = {}
    for camera, frames in data.frames.items():
        shape = tuple(frames.shape[1:])
        features[image_key(camera)] = {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
    for key, tensor in ((PROPRIO, data.proprio), (ACTION, data.actions), (OBJECTS, data.objects)):
        labels = list(names.get(key, [f"{key}_{i}" for i in range(tensor.shape[1])]))
        features[key] = {"dtype": "float32", "shape": (tensor.shape[1],), "names": labels}
    return features


def read_dataset(root: Path) -> Demonstrations:
    """Read a dataset written by `write_dataset` or by LeRobot itself with the same features; raises ValueError that names the
    fault."""
    check_dataset(root)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    _quiet()
    dataset = LeRobotDataset(REPOSITORY, root=root)
    table = dataset.hf_dataset.with_format("numpy")
    columns = {key: torch.from_numpy(np.stack(table[key][:]).astype(np.float32)) for key in (PROPRIO, ACTION, OBJECTS)}
    cameras = [key.removeprefix("observation.images.") for key in dataset.meta.camera_keys]
    raw = dataset.hf_dataset.with_format(None)
    frames = {
        camera: torch.from_numpy(np.stack([np.asarray(image) for image in raw[image_key(camera)][:]])) for camera in cameras
    }
    episode = torch.as_tensor(np.asarray(table["episode_index"][:]), dtype=torch.long)
    texts = dataset.meta.tasks.index
    task = np.asarray(table["task_index"][:])
    firsts = [int(torch.nonzero(episode == e)[0, 0]) for e in episode.unique()]
    facts = read_facts(root)
    return Demonstrations(
        frames=frames,
        proprio=columns[PROPRIO],
        actions=columns[ACTION],
        objects=columns[OBJECTS],
        episode=episode,
        instructions=tuple(str(texts[task[row]]) for row in firsts),
        seeds=tuple(facts.get("seeds", ())),
    )


def read_facts(root: Path) -> dict[str, Any]:
    """The sidecar of simulator facts; empty for datasets that others recorded."""
    path = root / "meta" / FACTS
    return read_json(path) if path.is_file() else {}


def check_dataset(root: Path) -> None:
    """Say plainly what is wrong with a local dataset: LeRobot itself would look for it on a hub and name the network."""
    import pyarrow.parquet as parquet

    info_path = root / "meta" / "info.json"
    if not info_path.is_file():
        raise ValueError(f"expected a LeRobot dataset at {root}, found no meta/info.json; record one with `wmrl-collect`")
    info = read_json(info_path)
    if info.get("codebase_version") != "v3.0":
        raise ValueError(
            f"expected a LeRobot v3.0 dataset at {root}, got {info.get('codebase_version')!r}; "
            "convert it with LeRobot's own script"
        )
    files = sorted((root / "data").rglob("*.parquet")) + sorted((root / "meta" / "episodes").rglob("*.parquet"))
    if not files or not any("episodes" in str(file) for file in files):
        raise ValueError(f"the dataset at {root} was not finalised (no episode table); record it again with `wmrl-collect`")
    for file in files:
        try:
            parquet.read_metadata(file)
        except Exception as error:  # pyarrow raises its own kinds; each means a file without a footer
            raise ValueError(
                f"the dataset at {root} was not finalised: {file.relative_to(root)} is cut off; record it again"
            ) from error
    features = info.get("features", {})
    missing = [key for key in (PROPRIO, ACTION, OBJECTS) if key not in features]
    if missing:
        have = ", ".join(sorted(features))
        raise ValueError(f"expected the features {PROPRIO}, {ACTION} and {OBJECTS} in {root}, missing {missing}; it has {have}")
