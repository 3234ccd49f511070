"""Keyed randomness: every random number has a name, so twins share it and a resumed run repeats it.

Shape legend: B rows, N uniforms of one decision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmrl.types import Start

_BITS = 23
"""k + 0.5 with k < 2^23 fits the 24-bit mantissa of float32, so no uniform ever rounds to 0 or 1."""


def derive_seed(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the purpose that `names` spell out, for example `derive_seed(seed, step, "anchors")`."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uniforms(seed: int, starts: Sequence[Start], members: Sequence[int], decision: int, size: int) -> Tensor:
    """Noise of one decision of every row, float32 (B, N) strictly inside (0, 1).

    One counter-based stream per (seed, scene hash, member, decision) (Philox, Salmon et al. 2011): the numbers do not depend on
    the order of rows, on the other rows or on the world, real or imagined.
    """
    table = np.empty((len(starts), size), dtype=np.uint64)
    philox = np.random.Philox(0)
    state: Any = philox.state
    keys = {start: int(start.scene_hash, 16) for start in dict.fromkeys(starts)}
    for row, (start, member) in enumerate(zip(starts, members, strict=True)):
        # Setting the state is six times faster than a new generator, and collecting asks for thousands of rows per update.
        key = np.array([seed & (2**64 - 1), keys[start]], dtype=np.uint64)
        counter = np.array([0, decision, int(member), 0], dtype=np.uint64)
        state["state"] = {"counter": counter, "key": key}
        philox.state = state  # its buffer is empty (nothing was drawn when `state` was taken)
        table[row] = philox.random_raw(size)
    return torch.from_numpy((((table >> np.uint64(64 - _BITS)) + 0.5) / 2**_BITS).astype(np.float32))
