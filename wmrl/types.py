"""The words of the project as types: what a start, a decision, a rollout and a world are.

Shape legend: B rollouts (or rows of a batch), T decisions, K tokens of one decision, H control steps of a chunk, A action
dimensions, F features, P proprioception, L language embedding. Real and imagined worlds, robots and programs, all speak
these types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Observation = dict[str, Any]
"""Name to a batch: tensors with leading dimension B, or lists of B strings (`instruction`)."""


class Status(IntEnum):
    """How a rollout stands. Only SUCCESS counts as success; CENSORED and INFRASTRUCTURE are neither success nor failure."""

    RUNNING = 0
    SUCCESS = 1
    FAILURE = 2
    TIME_LIMIT = 3
    CENSORED = 4
    UNSTABLE = 5
    INVALID = 6
    INFRASTRUCTURE = 7


NO_OUTCOME = (Status.CENSORED, Status.INFRASTRUCTURE)
"""Statuses that say nothing about the policy: never rewarded, never a training label."""


@dataclass(frozen=True)
class Start:
    """A reproducible beginning: resetting an environment to equal starts gives the same first state, bit for bit."""

    task: str
    seed: int
    instruction: str = ""
    split: str = "train"
    variant: str = ""
    snapshot: str = ""

    @cached_property
    def scene_hash(self) -> str:
        """Identity of the scene. Split and instruction are left out, so that the leak check sees through both."""
        key = json.dumps([self.task, self.seed, self.variant, self.snapshot])
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    @cached_property
    def group_key(self) -> str:
        """Identity of scene plus instruction: rollouts with equal keys form a group."""
        return hashlib.sha256(f"{self.scene_hash}|{self.instruction}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Decision:
    """What a policy returns for a batch of observations.

    actions   (B, ...)  what the environment executes: a chunk (B, H, A), a program's tokens (B, K), an arm (B,)
    log_probs (B, K)    log-probability of each token under the policy that chose it
    inputs              tensors (B, ...) that `Policy.log_prob` needs to recompute them
    """

    actions: Tensor
    log_probs: Tensor
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What an environment returns for one decision of every row.

    reward (B,) finite; status (B,) `Status` values (rows that had ended keep their status and get reward 0);
    seconds (B,) time the row's execution took; alive (B,) the probability that a row is still running after all decisions so
    far (1 or 0 in a real world; an imagined world may end rollouts softly, see `Rollouts.mask`; reward is weighted by it
    likewise); variance (B,) of the return so far,
    where a world model knows it.
    """

    observation: Observation
    reward: Tensor
    status: Tensor
    seconds: Tensor
    alive: Tensor
    variance: Tensor | None = None


@dataclass(frozen=True)
class Rollouts:
    """A padded batch of rollouts, real or imagined.

    starts          B starts; member (B,) index inside the group (-1: no policy played it); rollouts with one
                    `Start.group_key` form a group
    actions         (B, T, ...)
    inputs          name -> (B, T, ...): what the policy saw; `final` name -> (B, ...): the observation after the last decision
    log_probs       (B, T, K) under the policy that acted; token_mask (B, T, K) which tokens exist
    rewards         (B, T), unconditional: where a rollout ends softly, the reward times the probability of getting there
    mask            (B, T) probability that decision t was really taken: 1 or 0 in a real world
    status          (B,) final `Status`; seconds (B,) summed over the rollout
    values          optional (B, T+1)
    variance        optional (B,) variance of the predicted return (imagined only)
    """

    starts: tuple[Start, ...]
    member: Tensor
    actions: Tensor
    inputs: dict[str, Tensor]
    final: dict[str, Tensor]
    log_probs: Tensor
    token_mask: Tensor
    rewards: Tensor
    mask: Tensor
    status: Tensor
    seconds: Tensor
    policy_version: int = 0
    model_version: int = 0
    imagined: bool = False
    values: Tensor | None = None
    variance: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    """name -> (B, ...): further per-rollout tensors that ride along (predictions, simulator facts)."""

    def __len__(self) -> int:
        return len(self.starts)

    def returns(self) -> Tensor:
        """(B,) sum of rewards: for a sparse task the (expected) success."""
        return self.rewards.sum(dim=1)

    def num_decisions(self) -> int:
        """Number of decisions in this batch, soft endings counted in full."""
        return int((self.mask > 0).sum())

    def valid(self) -> Tensor:
        """(B,) bool: the rollout says something about the policy."""
        return ~torch.isin(self.status, torch.tensor([int(s) for s in NO_OUTCOME]))

    def group_index(self) -> Tensor:
        """(B,) index of each rollout's group, groups numbered in order of first appearance."""
        order: dict[str, int] = {}
        return torch.tensor([order.setdefault(s.group_key, len(order)) for s in self.starts], dtype=torch.long)

    def folds(self, count: int) -> Tensor:
        """(B,) fold of each rollout out of `count`: whole groups, every instruction spread over all folds."""
        numbers: dict[str, int] = {}
        seen: dict[str, int] = {}
        for start in self.starts:
            if start.group_key not in numbers:
                numbers[start.group_key] = seen.get(start.instruction, 0)
                seen[start.instruction] = numbers[start.group_key] + 1
        return torch.tensor([numbers[start.group_key] % count for start in self.starts], dtype=torch.long)

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> Rollouts:
        """Rows by slice, list of indices, index tensor or boolean tensor; always a batch."""
        rows = torch.arange(len(self))[index if isinstance(index, slice) else torch.as_tensor(index)]
        return replace(
            self,
            starts=tuple(self.starts[int(i)] for i in rows),
            **{f.name: _rows(getattr(self, f.name), rows) for f in fields(self) if f.name in _TENSOR_FIELDS},
        )

    def to(self, device: torch.device | str) -> Rollouts:
        """The same batch with every tensor on `device`."""
        moved = {f.name: _map(getattr(self, f.name), lambda t: t.to(device)) for f in fields(self) if f.name in _TENSOR_FIELDS}
        return replace(self, **moved)


_TENSOR_FIELDS = frozenset(
    "member actions inputs final log_probs token_mask rewards mask status seconds values variance extra".split()
)
_TIME_FIELDS = frozenset("actions inputs log_probs token_mask rewards mask values".split())


def concatenate(batches: Sequence[Rollouts]) -> Rollouts:
    """Join batches of one kind (all real or all imagined, of equal versions and keys), padding the shorter in time with
    mask 0."""
    if not batches:
        raise ValueError("expected at least one batch of rollouts, got none")
    if len({b.imagined for b in batches}) > 1:
        raise ValueError("expected batches of one kind, got real and imagined rollouts together")
    length = max(b.rewards.shape[1] for b in batches)
    joined: dict[str, Any] = {}
    for name in _TENSOR_FIELDS:
        values = [getattr(b, name) for b in batches]
        if any(v is None for v in values):
            joined[name] = None
            continue
        target = length + 1 if name == "values" else length
        if name in _TIME_FIELDS:
            values = [_map(v, lambda t, n=target: _pad_time(t, n)) for v in values]
        if isinstance(values[0], Mapping):
            joined[name] = {key: torch.cat([v[key] for v in values]) for key in values[0]}
        else:
            joined[name] = torch.cat(values)
    return replace(batches[-1], starts=tuple(s for b in batches for s in b.starts), **joined)


def _pad_time(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[1]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((tensor.shape[0], missing, *tensor.shape[2:]))], dim=1)


def _rows(value: Any, rows: Tensor) -> Any:
    return _map(value, lambda t: t[rows.to(t.device)])


def _map(value: Any, function: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: function(tensor) for key, tensor in value.items()}
    return function(value)


@dataclass(frozen=True)
class Estimate:
    """A predicted outcome per rollout: mean (B,), epistemic variance (B,) (ensemble), stochastic variance (B,)."""

    mean: Tensor
    epistemic: Tensor
    stochastic: Tensor


@runtime_checkable
class Environment(Protocol):
    """A world, real or imagined. `width` is how many rollouts run at once; results never depend on the number of workers."""

    width: int
    imagined: bool
    max_decisions: int

    def reset(self, starts: Sequence[Start]) -> Observation:
        """Begin at most `width` rollouts."""

    def step(self, actions: Tensor) -> Step:
        """Execute one decision (one action chunk, one program) in every row of the last `reset`."""


@runtime_checkable
class Policy(Protocol):
    """Stateless between calls: everything a decision depends on is in the observation and the noise. Tensors go in and come out
    on the CPU, wherever the weights are."""

    @property
    def noise_size(self) -> int:
        """Uniform numbers that one decision consumes."""

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        """Decide; noise (B, noise_size) uniform in (0, 1), or None for the greedy decision."""

    def log_prob(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """(..., K) log-probabilities of recorded actions (leading dimensions are kept), differentiable."""


@runtime_checkable
class WorldModel(Protocol):
    """A cheap world that learns from real rollouts."""

    version: int

    def predict(self, rollouts: Rollouts) -> Estimate:
        """The outcome of recorded decisions."""

    def fit(self, rollouts: Rollouts, *, seed: int) -> dict[str, float]:
        """Learn from all real rollouts so far; returns losses for the log and raises `version` by one."""


@runtime_checkable
class ImaginedWorld(WorldModel, Protocol):
    """A world model that can also be entered."""

    def environment(self) -> Environment:
        """The imagined environment; it always uses the newest fit."""
