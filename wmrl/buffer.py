"""The buffer: old real rollouts, from which the world model learns; and rollouts as plain nested values, for checkpoints."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from wmrl.types import Rollouts, Start, concatenate


class Buffer:
    """The newest `capacity` real rollouts, oldest first."""

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise ValueError(f"expected a buffer capacity of at least 1 rollout, got {capacity}")
        self.capacity = capacity
        self._rollouts: Rollouts | None = None

    def __len__(self) -> int:
        return 0 if self._rollouts is None else len(self._rollouts)

    def add(self, rollouts: Rollouts) -> None:
        """Append real rollouts that say something about the policy; the rest is left out, and the oldest go when it is full."""
        if rollouts.imagined:
            raise ValueError("expected real rollouts, got imagined ones: the world model must not learn from itself")
        usable = rollouts[rollouts.valid()]
        joined = usable if self._rollouts is None else concatenate([self._rollouts, usable])
        self._rollouts = joined[max(0, len(joined) - self.capacity) :]

    def all(self) -> Rollouts:
        if self._rollouts is None:
            raise ValueError("expected rollouts in the buffer, got none: add base rollouts before fitting a world model")
        return self._rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": None if self._rollouts is None else pack_rollouts(self._rollouts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        packed = state["rollouts"]
        self._rollouts = None if packed is None else unpack_rollouts(packed)


def pack_rollouts(rollouts: Rollouts) -> dict[str, Any]:
    """Tensors, numbers and strings in nested dictionaries and lists."""
    packed = {f.name: getattr(rollouts, f.name) for f in fields(rollouts)}
    return {**packed, "starts": [asdict(start) for start in rollouts.starts]}


def unpack_rollouts(packed: dict[str, Any]) -> Rollouts:
    """The inverse of `pack_rollouts`."""
    return Rollouts(**{**packed, "starts": tuple(Start(**start) for start in packed["starts"])})
