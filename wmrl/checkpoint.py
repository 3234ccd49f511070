"""Checkpoints in LeRobot's layout that a kill at any moment cannot spoil.

    checkpoints/000012/pretrained_model/   what `policy_files` writes: config.json, model.safetensors, train_config.json, ...
    checkpoints/000012/training_state/     training_step.json, state.json + state.safetensors (our whole state), manifest.json
    checkpoints/last -> 000012

A checkpoint is written beside its place and renamed, so that a numbered folder is whole; the manifest (size and SHA-256 of
every file) also catches what a full disk or a copy cut short. Layout: lerobot 0.6.1 `common/train_utils.py`. No pickles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from wmrl.files import read_json, remove_tree, sync_folder, sync_tree, write_json
from wmrl.state_codec import decode, encode

PRETRAINED, TRAINING, LAST = "pretrained_model", "training_state", "last"
MANIFEST = f"{TRAINING}/manifest.json"
FORMAT = 1
_READY = ".ready-"

_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names it and what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk. `skipped`: newer ones that were broken, one sentence each."""

    step: int
    path: Path
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()

    @property
    def pretrained(self) -> Path:
        """The folder that a LeRobot user passes as `--policy.path`."""
        return self.path / PRETRAINED


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    policy_files: Callable[[Path], None],
    state: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Save `checkpoints/<step>` below `folder` (a run folder, or the `checkpoints` folder itself) and point `last` to it.

    `policy_files(path)` writes the files of `pretrained_model` into the empty folder `path`; `state` is nested dicts, lists and
    tuples of tensors and plain values (`wmrl.state_codec`). Saving a step again replaces it. Afterwards only the newest `keep`
    whole checkpoints remain, the one just saved always among them. Returns its path.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected step >= 0 and keep >= 1, got step={step}, keep={keep}")
    checkpoints = _checkpoints_folder(folder)
    checkpoints.mkdir(parents=True, exist_ok=True)
    _finish_replacement(checkpoints)
    draft, ready, final = (checkpoints / f"{prefix}{step:06d}" for prefix in (".draft-", _READY, ""))
    _write(draft, step, policy_files, state)
    os.replace(draft, ready)
    _finish_replacement(checkpoints)
    _point_last(checkpoints, final.name)
    sync_folder(checkpoints)
    _prune(checkpoints, final, keep)
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder or `checkpoints` folder, None when there never was one.

    Broken ones are skipped, logged and named in `skipped`. Raises CheckpointError when there are only broken ones: starting
    over silently would lose what may still be saved by hand.
    """
    skipped: list[str] = []
    _finish_replacement(_checkpoints_folder(folder))
    for path in reversed(_numbered(_checkpoints_folder(folder))):
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            _log.warning("skipped: %s", error)
            skipped.append(str(error))
            continue
        return Checkpoint(found.step, found.path, found.state, tuple(skipped))
    if skipped:
        raise CheckpointError(f"expected one whole checkpoint in {folder}, got only broken ones: " + " | ".join(skipped))
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path` (a numbered folder, `last`, or the `pretrained_model` inside). Raises CheckpointError."""
    path = Path(path)
    if path.name == PRETRAINED:
        path = path.parent
    if not path.exists():
        raise CheckpointError(f"expected a checkpoint folder, found nothing at {path}")
    path = path.resolve()
    if not path.name.isdigit():
        raise CheckpointError(f"expected a numbered checkpoint folder such as checkpoints/000012, got {path}")
    verify(path)
    tree = read_json(path / TRAINING / "state.json")
    return Checkpoint(int(path.name), path, decode(tree, load_file(path / TRAINING / "state.safetensors")))


def verify(path: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file of the manifest is there, whole and unchanged."""
    advice = "resume from an older checkpoint, or delete this folder"
    try:
        manifest = read_json(path / MANIFEST)
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: no readable {MANIFEST}; {advice}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is broken: {name} is missing; {advice}")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is broken: {name} has {file.stat().st_size} bytes, expected {expected['bytes']}; {advice}"
            )
        if _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"checkpoint {path} is broken: the content of {name} has changed; {advice}")


def _write(draft: Path, step: int, policy_files: Callable[[Path], None], state: Mapping[str, Any]) -> None:
    (draft / PRETRAINED).mkdir(parents=True)
    (draft / TRAINING).mkdir()
    policy_files(draft / PRETRAINED)
    tree, tensors = encode(dict(state))
    write_json(draft / TRAINING / "training_step.json", {"step": step})
    (draft / TRAINING / "state.json").write_text(json.dumps(tree, allow_nan=False))
    save_file(tensors, draft / TRAINING / "state.safetensors")
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    listed = {p.relative_to(draft).as_posix(): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    write_json(draft / MANIFEST, {"format": FORMAT, "step": step, "files": listed})
    sync_tree(draft)


def _point_last(checkpoints: Path, name: str) -> None:
    link = checkpoints / f".{LAST}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, checkpoints / LAST)


def _prune(checkpoints: Path, newest: Path, keep: int) -> None:
    """Delete all but `newest` and the `keep - 1` whole ones before it. Steps above `newest` are a future that was abandoned."""
    step, whole = int(newest.name), 1
    for path in reversed(_numbered(checkpoints)):
        if int(path.name) < step and whole < keep and _is_whole(path):
            whole += 1
        elif path != newest:
            remove_tree(path)


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _finish_replacement(checkpoints: Path) -> None:
    """Put complete new checkpoints in place and drop what an interrupted save left.

    Replacing a folder takes two renames. A new checkpoint waits as `.ready-<step>` while the old one of that step is removed,
    so that at every moment one of the two is whole; whoever comes next, after a kill, does what is left.
    """
    if not checkpoints.is_dir():
        return
    for ready in checkpoints.glob(f"{_READY}*"):
        final = checkpoints / ready.name.removeprefix(_READY)
        if final.exists():
            remove_tree(final)
        os.replace(ready, final)
    for pattern in (".draft-*", ".trash-*"):
        for path in checkpoints.glob(pattern):
            shutil.rmtree(path)


def _checkpoints_folder(folder: Path) -> Path:
    folder = Path(folder)
    return folder if folder.name == "checkpoints" else folder / "checkpoints"


def _numbered(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, oldest step first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if path.name.isdigit() and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
