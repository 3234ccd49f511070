"""Stub worlds whose outcomes are known on paper, for the tests of playing and evaluating.

Shape legend: B rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wmrl.types import Decision, Observation, Start, Status, Step

Rule = Callable[[Start, Tensor, int], tuple[float, Status]]
"""(start, what the row was told to do, decision index) -> reward and status after it."""


class RuleWorld:
    """A real (or imagined) world that a rule judges; it remembers which starts it was given and every executed action."""

    def __init__(self, rule: Rule, *, width: int, max_decisions: int = 3, imagined: bool = False, texts: Any = list) -> None:
        self.rule, self.width, self.max_decisions, self.imagined, self.texts = rule, width, max_decisions, imagined, texts
        self.resets: list[Start] = []
        self.executed: list[Tensor] = []

    def reset(self, starts: Sequence[Start]) -> Observation:
        self.starts, self.decision = list(starts), 0
        self.status = [Status.RUNNING] * len(starts)
        self.resets += starts
        return self._observation()

    def step(self, actions: Tensor) -> Step:
        rewards, seconds = torch.zeros(len(self.starts)), torch.zeros(len(self.starts))
        self.executed.append(actions)
        for row, start in enumerate(self.starts):
            if self.status[row] == Status.RUNNING:
                rewards[row], self.status[row] = self.rule(start, actions[row], self.decision)
                seconds[row] = 0.1
        self.decision += 1
        status = torch.tensor([int(value) for value in self.status])
        return Step(self._observation(), rewards, status, seconds, (status == Status.RUNNING).float())

    def _observation(self) -> Observation:
        seeds = torch.tensor([[float(start.seed)] for start in self.starts])
        return {"seed": seeds, "instruction": self.texts([start.instruction for start in self.starts])}


class ConstantPolicy:
    """Always the same action."""

    noise_size = 1

    def __init__(self, action: float = 0.0) -> None:
        self.action = action

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        rows = len(observation["seed"])
        return Decision(torch.full((rows, 1), self.action), torch.zeros(rows, 1), {"seed": observation["seed"]})

    def log_prob(self, inputs: Any, actions: Tensor) -> Tensor:
        return torch.zeros(actions.shape[:-1] + (1,))
