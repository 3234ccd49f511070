"""A camera world that speaks features, so that the policy and the correction see real and imagined worlds alike.

Shape legend: B rows, F features, P proprioception, L language embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vla.policy import ENCODED, ChunkPolicy
from wmrl.buffer import Buffer
from wmrl.keyframes import observations, place_of
from wmrl.types import Environment, Observation, Start, Step


class EncodedEnvironment:
    """Wraps a camera environment: every observation also holds the policy's features, proprio and language.

    `told` replaces instructions before the policy reads them (the goal stays that of the start): with it an evaluation can
    check that the policy listens.
    """

    imagined = False

    def __init__(self, environment: Environment, policy: ChunkPolicy, *, told: Mapping[str, str] | None = None) -> None:
        self.environment, self.policy, self.told = environment, policy, dict(told or {})
        self.width, self.max_decisions = environment.width, environment.max_decisions

    def reset(self, starts: Sequence[Start]) -> Observation:
        """Encoded first observation of at most `width` starts."""
        return self._encode(self.environment.reset(starts))

    def step(self, actions: Tensor) -> Step:
        """Execute one chunk (B, H, A) in every row and encode what comes after."""
        step = self.environment.step(actions)
        return Step(self._encode(step.observation), step.reward, step.status, step.seconds, step.alive)

    def _encode(self, observation: Observation) -> Observation:
        told = {"instruction": [self.told.get(text, text) for text in observation["instruction"]]}
        return {**observation, **self.policy.encode({**observation, **told})}


class Beginnings:
    """Encoded observations where imagination begins: the first of real starts, each rendered once, and keyframes of the buffer.
    A reset executes no decision, so it costs time but no budget.

    Calling it gives the entries `names` of B starts, (B, ...) each: features, proprio, language, and what else the world model
    reads.
    """

    def __init__(
        self, environment: EncodedEnvironment, *, names: Sequence[str] = ENCODED, buffer: Buffer | None = None
    ) -> None:
        self.environment, self.names, self.buffer = environment, tuple(names), buffer
        self.num_resets = 0
        self._known: dict[str, Observation] = {}

    def __call__(self, starts: Sequence[Start]) -> Observation:
        """Rows in the order of the starts, which are all keyframes or none."""
        if any(place_of(start) is not None for start in starts):
            assert self.buffer is not None, "a keyframe without a buffer"
            return observations(self.buffer.all(), starts, self.names)
        new = list({start.group_key: start for start in starts if start.group_key not in self._known}.values())
        width = self.environment.width
        for begin in range(0, len(new), width):
            wave = new[begin : begin + width]
            padded = wave + [wave[-1]] * (width - len(wave))
            observation = self.environment.reset(padded)
            self.num_resets += len(wave)
            for row, start in enumerate(wave):
                self._known[start.group_key] = {key: observation[key][row] for key in self.names}
        rows = [self._known[start.group_key] for start in starts]
        return {key: torch.stack([row[key] for row in rows]) for key in self.names}
