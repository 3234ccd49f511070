"""The imagined environment: the same interface as the real one, one learned call per action chunk, soft endings.

Shape legend: B rows, E members, S state (all its entries side by side), H control steps, A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from wmrl.keyframes import decisions_before
from wmrl.types import Observation, Start, Status, Step
from world_model.network import ChunkEnsemble


class ImaginedEnvironment:
    """Rolls the ensemble's mean state forward. A rollout is never ended by a draw: each step reports the probability that the
    task was solved in it (`reward`, weighted by the probability of getting there) and that the rollout still runs (`alive`).
    A keyframe begins in the middle of an episode; its deadline stays that of the episode."""

    imagined = True

    def __init__(
        self,
        network: ChunkEnsemble,
        *,
        sizes: Mapping[str, int],
        horizon: int,
        beginnings: Callable[[Sequence[Start]], Observation],
        width: int,
    ) -> None:
        self.network, self.max_decisions, self.beginnings, self.width = network, horizon, beginnings, width
        self.sizes = sizes

    def reset(self, starts: Sequence[Start]) -> Observation:
        """Begin at real states: the first of an episode, or keyframes."""
        observation = self.beginnings(starts)
        self._language = observation["language"]
        self._state = torch.cat([observation[name].float() for name in self.sizes], dim=-1)
        self._alive = torch.ones(len(starts))
        self._member_alive = torch.ones(self.network.members, len(starts))
        self._status = torch.full((len(starts),), int(Status.RUNNING))
        self._decisions_left = self.max_decisions - decisions_before(starts)
        return self._observation()

    def step(self, actions: Tensor) -> Step:
        """Imagine one chunk (B, H, A) in every row that still runs; a row whose numbers leave the finite is censored, never
        rewarded."""
        begin = time.perf_counter()
        running = self._status == int(Status.RUNNING)
        state, hazard = self.network.imagine(self._state, actions.flatten(1))
        broken = running & ~(torch.isfinite(state).all(-1) & torch.isfinite(hazard).all(0))
        self._status[broken] = int(Status.CENSORED)
        running &= ~broken
        hazard = torch.where(running, hazard, torch.zeros_like(hazard))
        self._state = torch.where(running[:, None], state, self._state)
        reward = self._alive * hazard.mean(0)
        self._alive = self._alive * (1.0 - hazard.mean(0))
        self._member_alive = self._member_alive * (1.0 - hazard)
        self._decisions_left -= running.long()
        ended = running & (self._decisions_left == 0)
        self._status[ended & (self._alive < 0.5)] = int(Status.SUCCESS)
        self._status[ended & (self._alive >= 0.5)] = int(Status.TIME_LIMIT)
        alive = torch.where(running & ~ended, self._alive, torch.zeros_like(self._alive))
        seconds = torch.full((len(reward),), (time.perf_counter() - begin) / len(reward))
        return Step(self._observation(), reward, self._status.clone(), seconds, alive, self._member_alive.var(0))

    def _observation(self) -> Observation:
        entries = self._state.split(list(self.sizes.values()), dim=-1)
        return {**dict(zip(self.sizes, entries, strict=True)), "language": self._language}
