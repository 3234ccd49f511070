"""The imagined environment: the same interface as the real one, one learned call per action chunk, soft endings.

Shape legend: B rows, E members, F features, P proprioception, S = F + P, H control steps, A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wmrl.types import Observation, Start, Status, Step
from world_model.network import ChunkEnsemble


class ImaginedEnvironment:
    """Rolls the ensemble's mean state forward. A rollout is never ended by a draw: each step reports the probability that the
    task was solved in it (`reward`, weighted by the probability of getting there) and that the rollout still runs (`alive`)."""

    imagined = True

    def __init__(
        self,
        network: ChunkEnsemble,
        *,
        horizon: int,
        beginnings: Callable[[Sequence[Start]], Observation],
        width: int,
    ) -> None:
        self.network, self.max_decisions, self.beginnings, self.width = network, horizon, beginnings, width

    def reset(self, starts: Sequence[Start]) -> Observation:
        """Begin at real start states: their first encoded observation."""
        observation = self.beginnings(starts)
        self._language = observation["language"]
        self._feature_size = observation["features"].shape[1]
        self._state = torch.cat([observation["features"], observation["proprio"]], dim=-1)
        self._alive = torch.ones(len(starts))
        self._member_alive = torch.ones(self.network.members, len(starts))
        self._status = torch.full((len(starts),), int(Status.RUNNING))
        self._decision = 0
        return observation

    def step(self, actions: Tensor) -> Step:
        """Imagine one chunk (B, H, A) in every row; a row whose numbers leave the finite is censored, never rewarded."""
        begin = time.perf_counter()
        state, hazard = self.network.imagine(self._state, actions.flatten(1))
        broken = ~(torch.isfinite(state).all(-1) & torch.isfinite(hazard).all(0))
        self._status[broken] = int(Status.CENSORED)
        stopped = self._status == int(Status.CENSORED)
        hazard = torch.where(stopped, torch.zeros_like(hazard), hazard)
        self._state = torch.where(stopped[:, None], self._state, state)
        reward = self._alive * hazard.mean(0)
        self._alive = torch.where(stopped, torch.zeros_like(self._alive), self._alive * (1.0 - hazard.mean(0)))
        self._member_alive = self._member_alive * (1.0 - hazard)
        self._decision += 1
        if self._decision == self.max_decisions:
            done = ~stopped
            self._status[done & (self._alive < 0.5)] = int(Status.SUCCESS)
            self._status[done & (self._alive >= 0.5)] = int(Status.TIME_LIMIT)
        seconds = torch.full((len(reward),), (time.perf_counter() - begin) / len(reward))
        return Step(self._observation(), reward, self._status.clone(), seconds, self._alive.clone(), self._member_alive.var(0))

    def _observation(self) -> Observation:
        return {
            "features": self._state[:, : self._feature_size],
            "proprio": self._state[:, self._feature_size :],
            "language": self._language,
        }
