"""A critic for real rollouts: how likely success still is in each state, so that credit goes to the decisions that changed it.

Shape legend: B rollouts, T decisions, N rows (states with their outcome), E members, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wmrl.ensemble import MemberLinear
from wmrl.types import Rollouts


@dataclass(frozen=True)
class CriticConfig:
    """The settings of the prototype, where credit by this critic gained 0.22 at 256 real episodes and leave-one-out 0.13.

    `enabled` false: trajectory-level leave-one-out advantages, the paper's baseline.
    """

    enabled: bool = True
    inputs: tuple[str, ...] = ("features", "proprio")
    """What the critic reads: policy inputs, or observation entries that the rollouts record beside them (privileged state, as
    in asymmetric actor-critic, arXiv 1710.06542). The decision index is added: a deadline makes values depend on it."""
    folds: int = 4
    members_per_fold: int = 2
    width: int = 64
    steps: int = 120
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.03
    input_noise: float = 0.1

    def __post_init__(self) -> None:
        if self.folds < 2 or min(self.members_per_fold, self.width, self.steps, self.batch_size) < 1:
            raise ValueError(
                "expected critic.folds >= 2 (a critic may not judge what it learned from) and positive sizes, "
                f"got folds={self.folds}, members_per_fold={self.members_per_fold}, width={self.width}, "
                f"steps={self.steps}, batch_size={self.batch_size}"
            )
        if self.learning_rate <= 0 or self.weight_decay < 0 or self.input_noise < 0:
            raise ValueError(
                "expected critic.learning_rate above 0, weight_decay and input_noise at least 0, "
                f"got {self.learning_rate}, {self.weight_decay} and {self.input_noise}"
            )


class CrossFittedCritic:
    """Values of this step's real rollouts from networks that never saw the rollout they judge.

    Every fold of the rollouts (by member inside the group, so that siblings are seen) has its own networks, fitted afresh on
    all earlier rollouts and the other folds. A baseline that does not depend on the rollout's own outcome leaves the gradient
    unbiased. The networks live on `device`; rollouts come and go on the CPU.
    """

    def __init__(self, config: CriticConfig, *, num_decisions: int, device: torch.device | str = "cpu") -> None:
        self.config, self.num_decisions, self.device = config, num_decisions, torch.device(device)
        self._inputs: Tensor | None = None
        self._targets = torch.zeros(0)

    def judge(self, real: Rollouts, *, seed: int) -> Rollouts:
        """The same rollouts with `values` (B, T+1); the entry after the last decision is 0 (a deadline ends the task)."""
        batch, length = real.rewards.shape
        inputs = self._table(real)
        targets = real.rewards.flip(1).cumsum(1).flip(1)
        taken = (real.mask > 0) & real.valid()[:, None]
        fold = (real.member % self.config.folds)[:, None].expand(batch, length)
        network = self._fit(inputs[taken], targets[taken], fold[taken], seed)
        with torch.no_grad():
            judged = network(inputs.flatten(0, 1).to(self.device)).cpu()
        judged = judged.unflatten(1, (batch, length)).unflatten(0, (self.config.folds, -1)).mean(1)
        values = judged.gather(0, fold[None])[0] * (real.mask > 0)
        self._remember(inputs[taken], targets[taken])
        return replace(real, values=torch.cat([values, torch.zeros(batch, 1)], dim=1))

    def _table(self, rollouts: Rollouts) -> Tensor:
        """(B, T, I) inputs with the decision index as one-hot."""
        missing = [name for name in self.config.inputs if name not in rollouts.inputs]
        if missing:
            raise ValueError(
                f"expected rollouts that record {missing[0]!r} for the critic, found {sorted(rollouts.inputs)}; "
                "collect them again, or change critic.inputs"
            )
        batch, length = rollouts.rewards.shape
        index = functional.one_hot(torch.arange(length), self.num_decisions).float().expand(batch, -1, -1)
        return torch.cat([*(rollouts.inputs[name].float() for name in self.config.inputs), index], dim=-1)

    def _fit(self, inputs: Tensor, targets: Tensor, fold: Tensor, seed: int) -> _Values:
        """Networks of all folds at once; rows (N, I), targets (N,), fold (N,): whose networks must not see it (-1: all may)."""
        config = self.config
        if self._inputs is not None:
            inputs, targets = torch.cat([self._inputs, inputs]), torch.cat([self._targets, targets])
            fold = torch.cat([fold.new_full((len(self._inputs),), -1), fold])
        generator = torch.Generator().manual_seed(seed % 2**63)
        owner = torch.arange(config.folds).repeat_interleave(config.members_per_fold)
        allowed = (fold[None] != owner[:, None]).float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            network = _Values(inputs, (allowed @ targets) / allowed.sum(1), config.width).to(self.device)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        optimiser = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        for _ in range(config.steps):
            drawn = torch.multinomial(allowed, config.batch_size, replacement=True, generator=generator)
            noise = torch.randn((*drawn.shape, inputs.shape[1]), generator=generator) * config.input_noise
            rows, noise = drawn.to(self.device), noise.to(self.device)
            loss = functional.mse_loss(network.members(network.normalise(inputs[rows]) + noise), targets[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        return network

    def _remember(self, inputs: Tensor, targets: Tensor) -> None:
        old = self._inputs
        self._inputs = inputs if old is None else torch.cat([old, inputs])
        self._targets = torch.cat([self._targets, targets])

    def state_dict(self) -> dict[str, Any]:
        """Earlier states and outcomes; the networks are fitted afresh at every step."""
        return {"inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._inputs, self._targets = state["inputs"], state["targets"]


class _Values(nn.Module):
    """E value networks with common normalisation; outputs start at `base` (E,), each network's mean outcome."""

    mean: Tensor
    scale: Tensor
    base: Tensor

    def __init__(self, inputs: Tensor, base: Tensor, width: int) -> None:
        super().__init__()
        members = len(base)
        self.register_buffer("mean", inputs.mean(0))
        self.register_buffer("scale", inputs.std(0, unbiased=False).clamp_min(1e-2))
        self.layers = nn.Sequential(
            MemberLinear(members, inputs.shape[1], width),
            nn.SiLU(),
            MemberLinear(members, width, width),
            nn.SiLU(),
            MemberLinear(members, width, 1, zero=True),
        )
        self.register_buffer("base", base[:, None])
        self.count = members

    def normalise(self, inputs: Tensor) -> Tensor:
        """Zero mean, unit deviation over the rows seen."""
        return ((inputs - self.mean) / self.scale).clamp(-5.0, 5.0)

    def members(self, normalised: Tensor) -> Tensor:
        """(E, B, I) -> (E, B)."""
        return self.layers(normalised)[..., 0] + self.base

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, I) -> (E, B) values of every member."""
        return self.members(self.normalise(inputs).expand(self.count, -1, -1))
