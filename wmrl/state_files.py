"""Nested states and rollouts in one safetensors file each: written atomically, read back equal to the last bit, no pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from wmrl.buffer import pack_rollouts, unpack_rollouts
from wmrl.state_codec import decode, encode
from wmrl.types import Rollouts


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Nested dicts, lists and tuples of tensors and plain values; written beside the target and renamed: whole or absent."""
    tree, tensors = encode(dict(state))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    save_file(tensors, draft, metadata={"tree": json.dumps(tree)})
    os.replace(draft, path)


def load_state(path: Path) -> dict[str, Any]:
    """Inverse of `save_state`; ValueError that names a missing or damaged file."""
    if not path.is_file():
        raise ValueError(f"expected a saved state at {path}, found no file; run the stage that writes it first")
    try:
        with safe_open(path, framework="pt") as file:
            tree = json.loads(file.metadata()["tree"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"expected a whole file at {path}, it is damaged ({error}); delete it and run its stage again"
        ) from error
    state: dict[str, Any] = decode(tree, tensors)
    return state


def save_rollouts(path: Path, rollouts: Rollouts) -> None:
    """One batch of rollouts as a state."""
    save_state(path, pack_rollouts(rollouts))


def load_rollouts(path: Path) -> Rollouts:
    """Inverse of `save_rollouts`."""
    return unpack_rollouts(load_state(path))


def without_inputs(rollouts: Rollouts, names: Sequence[str]) -> Rollouts:
    """The rollouts without some recorded observation entries (camera frames, for example)."""
    return replace(
        rollouts,
        inputs={name: tensor for name, tensor in rollouts.inputs.items() if name not in names},
        final={name: tensor for name, tensor in rollouts.final.items() if name not in names},
    )
