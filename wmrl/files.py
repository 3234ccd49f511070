"""Files that are either the old or the new one, whatever kills the process in between, and JSON that any reader accepts."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step (temporary file beside it, fsync, rename)."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON, see `plain`."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def json_line(value: Mapping[str, Any]) -> str:
    """One line of a `.jsonl` file."""
    return json.dumps(plain(value), allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ValueError naming the file when it is broken."""
    try:
        return json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected JSON in {path}, got a broken file ({error}); delete or restore it") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a `.jsonl` file ([] when there is none). A last line that a kill cut short is left out.

    Raises ValueError when any other line is broken.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline behind it: the writer died here
                break
            raise ValueError(f"expected JSON in line {number} of {path}, got {line[:60]!r}; repair or delete it") from error
    return records


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a `.jsonl` file in one step."""
    write_text(path, "".join(json_line(record) for record in records))


def plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch, paths, tuples and mappings as what JSON knows; NaN and infinities become null.

    JSON has no NaN, and readers disagree about Python's spelling of it; null means "there is no such number".
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"expected a number, text, list or mapping for JSON, got {type(value).__name__}")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def remove_tree(folder: Path) -> None:
    """Delete a folder in such a way that a kill in between leaves nothing under its name that looks whole."""
    trash = folder.with_name(f".trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.replace(folder, trash)
    shutil.rmtree(trash)
