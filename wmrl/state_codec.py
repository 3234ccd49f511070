"""Nested state (dicts, lists, tuples, tensors, plain values) to one JSON tree and one flat dict of tensors, and exactly back.

No pickles: a checkpoint from a stranger must not run code. Whatever would not come back equal and of the same type is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TENSOR, _TUPLE, _ITEMS, _FLOAT = "__tensor__", "__tuple__", "__items__", "__float__"


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """(tree for JSON, tensors by name). Tensors are detached, copied to the CPU, made contiguous and never share storage.

    Raises ValueError naming the place of a value that is none of: dict, list, tuple, str, bool, int, float, None, tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, "", tensors), tensors


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` was given."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(decode(item, tensors) for item in tree[_TUPLE])
    if _ITEMS in tree:
        return {decode(key, tensors): decode(item, tensors) for key, item in tree[_ITEMS]}
    if _FLOAT in tree:
        return float(tree[_FLOAT])
    return {key: decode(item, tensors) for key, item in tree.items()}


def _encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # A clone of its own storage: saving a slice would store the whole tensor behind it.
        name = f"{len(tensors):06d}{place}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, tensors)
    if type(value) in (list, tuple):
        items = [_encode(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise ValueError(
        f"expected a tensor or a plain value at {place.lstrip('.') or 'the top'} of the state, got {type(value).__name__}; "
        "turn it into a tensor, number, text, list or dict"
    )


def _encode_mapping(value: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> Any:
    simple = all(type(key) is str and not key.startswith("__") for key in value)
    if simple:
        return {key: _encode(item, f"{place}.{key}", tensors) for key, item in value.items()}
    # JSON turns every key into text; the optimiser's keys are integers.
    return {_ITEMS: [[_encode(key, place, tensors), _encode(item, f"{place}.{key}", tensors)] for key, item in value.items()]}


def state_hash(state: Any) -> str:
    """SHA-256 of a state: equal exactly when structure, types and every bit of every number are (NaN equals NaN)."""
    tree, tensors = encode(state)
    digest = hashlib.sha256(json.dumps(tree, allow_nan=False).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
