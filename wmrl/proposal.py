"""Updates on trial: what imagination proposes, so that real rollouts can judge it, and how it is taken back.

Shape legend: B rollouts, T decisions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from wmrl.objective import Objective, TrainablePolicy
from wmrl.types import Rollouts

MAX_LOG_RATIO = 3.0
"""Ratios are capped at 20: a single decision must not decide what hundreds say."""


class Proposal:
    """Remembers the policy on the other side of a step's imagined updates: before them where they are kept, after them where
    they are taken back. The policy that then acts is the trained one; its real rollouts judge the difference."""

    def __init__(self, policy: TrainablePolicy, objective: Objective) -> None:
        self._policy, self._objective = policy, objective
        self._other = frozen_copy(policy)
        self._state: dict[str, Any] = {}
        self.kept = True

    def begin(self, *, kept: bool) -> None:
        """Call before the updates."""
        self.kept = kept
        self._state = {} if kept else copy.deepcopy(self._objective.state_dict())
        with torch.no_grad():
            for policy, other in self._trained():
                other.copy_(policy)

    def end(self) -> None:
        """Call after the updates: what is not kept leaves no trace in policy or optimiser."""
        if self.kept:
            return
        with torch.no_grad():
            for policy, other in self._trained():
                proposed = policy.clone()
                policy.copy_(other)
                other.copy_(proposed)
        self._objective.load_state_dict(self._state)

    @torch.no_grad()
    def change(self, real: Rollouts) -> Tensor:
        """(B, T) how much more probable the updates make each real decision, in units of the policy that acted (see
        `relative_change`); with a minus where that policy is the one with the updates."""
        change = relative_change(self._other.log_prob(real.inputs, real.actions), real)
        return -change if self.kept else change

    def _trained(self) -> list[tuple[Tensor, Tensor]]:
        others = dict(self._other.named_parameters())
        return [(p, others[name]) for name, p in self._policy.named_parameters() if p.requires_grad]


def relative_change(log_probs: Tensor, real: Rollouts) -> Tensor:
    """(B, T) q / p - 1 of each real decision under another policy q, log_probs (B, T, K), and the policy p that acted.

    But for the cap its mean over p's decisions is 0 in every state, whatever q is, so by itself it is uncorrelated with any
    outcome that the decision does not influence. The logarithm would not do: its mean is -KL(p, q), which differs from state
    to state.
    """
    tokens = torch.where(real.token_mask, log_probs - real.log_probs, 0.0)
    return tokens.sum(-1).clamp(max=MAX_LOG_RATIO).expm1()


def frozen_copy(policy: TrainablePolicy) -> TrainablePolicy:
    """An independent copy that nothing trains."""
    other = copy.deepcopy(policy)
    for _, parameter in other.named_parameters():
        parameter.requires_grad_(False)
    return other
