"""Keyframes: states inside recorded real rollouts, as starts of imagination.

From the first state of an episode a world model hardly ranks the policy's actions, since its errors grow with every chunk; from
a state that the policy has really reached it need not go far. A keyframe is a `Start` whose snapshot names a row of the buffer
and a decision of that row. Its group is a set of branches: rollouts that differ from their first decision on.

Shape legend: B rollouts, T decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wmrl.buffer import Buffer
from wmrl.noise import derive_seed
from wmrl.types import Observation, Rollouts, Start

_PREFIX = "buffer"


def keyframe(start: Start, row: int, decision: int) -> Start:
    """The state before `decision` of the buffer's rollout `row`, which began at `start`."""
    return replace(start, snapshot=f"{_PREFIX}:{row}:{decision}")


def place_of(start: Start) -> tuple[int, int] | None:
    """(row, decision) of a keyframe; None for a start that is none."""
    if not start.snapshot.startswith(f"{_PREFIX}:"):
        return None
    _, row, decision = start.snapshot.split(":")
    return int(row), int(decision)


def decisions_before(starts: Sequence[Start]) -> Tensor:
    """(B,) decisions that were already taken when imagination begins: 0 except at keyframes."""
    places = [place_of(start) for start in starts]
    return torch.tensor([0 if place is None else place[1] for place in places], dtype=torch.long)


class Keyframes:
    """Draws keyframes of a step from everything in the buffer, keyed by (seed, step, block); all of a block are different."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        self._buffer, self._seed = buffer, seed

    def __call__(self, step: int, block: int, count: int) -> tuple[Start, ...]:
        """`count` keyframes (or all there are), uniform over the decisions that a policy really took."""
        rollouts = self._buffer.all()
        taken = torch.nonzero((rollouts.mask > 0) & (rollouts.member >= 0)[:, None])
        generator = torch.Generator().manual_seed(derive_seed(self._seed, step, "keyframes", block))
        chosen = taken[torch.randperm(len(taken), generator=generator)[:count]].tolist()
        chosen.sort(key=lambda place: -place[1])  # those near the deadline together: a wave stops when all of its rows have
        return tuple(keyframe(rollouts.starts[row], row, decision) for row, decision in chosen)


def observations(rollouts: Rollouts, starts: Sequence[Start], names: Sequence[str]) -> Observation:
    """What was recorded at keyframes of these rollouts, (B, ...) by name."""
    places = [place for place in map(place_of, starts) if place is not None]
    assert len(places) == len(starts), "a start without a keyframe"
    rows, decisions = torch.tensor(places).unbind(1)
    return {name: rollouts.inputs[name][rows, decisions] for name in names}


def branches(imagined: Rollouts) -> Rollouts:
    """Imagined rollouts as one decision each, the first one, with the whole imagined return as its reward: the later decisions
    were taken in states of the model's making, and their gradient is left out."""
    return replace(
        imagined,
        actions=imagined.actions[:, :1],
        inputs={name: values[:, :1] for name, values in imagined.inputs.items()},
        log_probs=imagined.log_probs[:, :1],
        token_mask=imagined.token_mask[:, :1],
        rewards=imagined.returns()[:, None],
        mask=imagined.mask[:, :1],
        values=None,
    )
