"""The latent world model: from the policy's features, proprioception and one action chunk to what comes next and the outcome.

Shape legend: B rollouts, T decisions, N transitions, E ensemble members, F features, P proprioception, S = F + P state, H
control steps of a chunk, A action dimensions, C = H x A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wmrl.types import Estimate, Observation, Rollouts, Start
from world_model.imagination import ImaginedEnvironment
from world_model.network import ChunkEnsemble

MIN_SCALE = 1e-3
"""Floor of normalisation scales, so that a constant dimension stays harmless."""


@dataclass(frozen=True)
class LatentConfig:
    """Size and fitting of the ensemble. Fit steps grow with the data: the prototype lost 0.16 real success at fixed steps."""

    members: int = 4
    width: int = 256
    blocks: int = 2
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    batch_size: int = 128
    passes: float = 60.0
    """How often the first fit sees every transition."""
    refresh_passes: float = 12.0
    unroll: int = 4
    """Chunks that a training piece goes on from the model's own states; a step sees batch_size chunks whatever it is."""
    success_weight: float = 1.0
    input_noise: float = 0.05
    """Deviation of the noise on input states, in units of their deviation: the model must survive its own errors."""

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"expected at least 2 ensemble members (their spread is the uncertainty), got {self.members}")
        for name in ("width", "blocks", "batch_size", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.passes <= 0 or self.refresh_passes <= 0:
            raise ValueError(f"expected positive passes, got {self.passes} and {self.refresh_passes}")


class LatentWorldModel:
    """Implements `wmrl.types.ImaginedWorld` for robots. `beginnings(starts)` gives the encoded first observation of real
    starts. The ensemble lives on `device` and computes in `precision`; rollouts come and go on the CPU."""

    def __init__(
        self,
        config: LatentConfig,
        *,
        state_size: int,
        chunk_size: int,
        horizon: int,
        beginnings: Callable[[Sequence[Start]], Observation],
        width: int = 256,
        device: torch.device | str = "cpu",
        precision: str = "off",
    ) -> None:
        self.config, self.horizon, self.beginnings, self.width = config, horizon, beginnings, width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = ChunkEnsemble(
                state_size,
                chunk_size,
                members=config.members,
                width=config.width,
                blocks=config.blocks,
                precision=precision,
            )
        self.network, self.device = network.to(device), torch.device(device)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.version = 0

    def environment(self) -> ImaginedEnvironment:
        """The imagined world; it always uses the newest fit."""
        return ImaginedEnvironment(self.network, horizon=self.horizon, beginnings=self.beginnings, width=self.width)

    @torch.no_grad()
    def predict(self, rollouts: Rollouts) -> Estimate:
        """Success of recorded decisions, imagined from the first observation only; decisions past the recorded end do not
        count.

        mean (B,): one minus the product of (1 - hazard). epistemic (B,): variance over members. stochastic (B,): zero, since
        the mean is a probability and not a draw (method: p(1-p) is no noise of the prediction).
        """
        survival = self.member_hazards(rollouts).neg().add(1.0).prod(dim=-1)
        success = 1.0 - survival
        return Estimate(success.mean(0), success.var(0), torch.zeros(success.shape[1]))

    @torch.no_grad()
    def member_hazards(self, rollouts: Rollouts) -> Tensor:
        """(E, B, T) success probability of each recorded chunk, replayed from the first observation along the mean state."""
        self.network.eval()
        state = states_of(rollouts)[:, 0]
        hazards = []
        for step in range(rollouts.rewards.shape[1]):
            state, hazard = self.network.imagine(state, rollouts.actions[:, step].flatten(1))
            hazards.append(hazard * (rollouts.mask[:, step] > 0))
        return torch.stack(hazards, dim=-1)

    def fit(self, rollouts: Rollouts, *, seed: int) -> dict[str, float]:
        """Learn from all real rollouts so far (failures included); the first fit also takes the normalisation from them."""
        data = Transitions.of(rollouts)
        sequences = Sequences.of(rollouts)
        taken = torch.nonzero(sequences.taken)
        sequences = sequences.to(self.device)
        if self.version == 0:
            self._set_scales(data)
        passes = self.config.passes if self.version == 0 else self.config.refresh_passes
        steps = max(1, round(passes * len(data) / self.config.batch_size))
        generator = torch.Generator().manual_seed(seed)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, steps, eta_min=self.config.learning_rate / 20)
        self.network.train()
        sums = torch.zeros(2, device=self.device)
        for _ in range(steps):
            sums += self._fit_step(sequences, taken, generator)
            schedule.step()
        for group in self.optimiser.param_groups:
            group["lr"] = group["initial_lr"] = self.config.learning_rate
        self.network.eval()
        self.version += 1
        change, outcome = (sums / steps).cpu().tolist()
        return {"change_loss": change, "outcome_loss": outcome, "transitions": float(len(data)), "fit_steps": float(steps)}

    def _fit_step(self, data: Sequences, taken: Tensor, generator: torch.Generator) -> Tensor:
        """One gradient step on pieces of `unroll` chunks that begin at a recorded state and go on from the model's own."""
        config, network, device = self.config, self.network, self.device
        pieces = max(1, config.batch_size // config.unroll)
        drawn = taken[torch.randint(0, len(taken), (config.members, pieces), generator=generator)]
        row, first = drawn.to(device).unbind(-1)
        state = data.state[row, first]
        noise = torch.randn(state.shape, generator=generator).to(device)
        state = state + noise * config.input_noise * network.state_scale
        inside = torch.ones_like(row, dtype=torch.bool)
        change_loss, outcome_loss, count = torch.zeros(3, device=device)
        for offset in range(config.unroll):
            step = (first + offset).clamp_max(data.taken.shape[1] - 1)
            inside = inside & (first + offset < data.taken.shape[1]) & data.taken[row, step]
            success = data.success[row, step]
            change, logit = network.normalised(state, data.chunk[row, step])
            error = functional.smooth_l1_loss(
                change, (data.following[row, step] - state) / network.change_scale, reduction="none"
            )
            change_loss = change_loss + (error.mean(-1) * inside * (1 - success)).sum()
            surprise = functional.binary_cross_entropy_with_logits(logit, success, reduction="none")
            outcome_loss, count = outcome_loss + (surprise * inside).sum(), count + inside.sum()
            state = state + change * network.change_scale
        loss = (change_loss + config.success_weight * outcome_loss) / count
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0, error_if_nonfinite=True)
        self.optimiser.step()
        return torch.stack([change_loss.detach(), outcome_loss.detach()]) / count

    def _set_scales(self, data: Transitions) -> None:
        network, moved = self.network, data.continues > 0
        network.state_mean.copy_(data.state.mean(0))
        network.state_scale.copy_(data.state.std(0).clamp_min(MIN_SCALE))
        rate = data.success.mean().clamp(0.01, 0.99)
        # begin at the base rate: a model that starts at 0.5 believes in everything
        network.outcome.bias.data.fill_(rate.logit().item())
        network.change_scale.copy_((data.following - data.state)[moved].std(0).clamp_min(MIN_SCALE))

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser and version."""
        return {"network": self.network.state_dict(), "optimiser": self.optimiser.state_dict(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.version = int(state["version"])


@dataclass(frozen=True)
class Transitions:
    """What the ensemble learns from: state (N, S), chunk (N, C), following state (N, S), continues (N,) whether it is known,
    success (N,) whether the task was solved within the chunk."""

    state: Tensor
    chunk: Tensor
    following: Tensor
    continues: Tensor
    success: Tensor

    def __len__(self) -> int:
        return len(self.state)

    @staticmethod
    def of(rollouts: Rollouts) -> Transitions:
        """Every decision that was really taken. A chunk that ended in success stops midway: its label counts, its end state
        does not."""
        data = Sequences.of(rollouts)
        taken, success = data.taken, data.success[data.taken]
        return Transitions(data.state[taken], data.chunk[taken], data.following[taken], 1 - success, success)


@dataclass(frozen=True)
class Sequences:
    """The same by rollout: state (B, T, S), chunk (B, T, C), following (B, T, S), taken (B, T) bool, success (B, T)."""

    state: Tensor
    chunk: Tensor
    following: Tensor
    taken: Tensor
    success: Tensor

    def to(self, device: torch.device) -> Sequences:
        """The same with every tensor on `device`."""
        return Sequences(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @staticmethod
    def of(rollouts: Rollouts) -> Sequences:
        """Rollouts without an outcome have no taken decision."""
        state = states_of(rollouts)
        taken = (rollouts.mask > 0) & rollouts.valid()[:, None]
        last = final_states_of(rollouts)[:, None]
        ends = taken & ~torch.cat([taken[:, 1:], torch.zeros_like(taken[:, :1])], dim=1)
        following = torch.where(ends[..., None], last, torch.cat([state[:, 1:], last], dim=1))
        return Sequences(state, rollouts.actions.flatten(2), following, taken, (rollouts.rewards > 0).float())


def states_of(rollouts: Rollouts) -> Tensor:
    """(B, T, S) what the model sees of each decision."""
    return torch.cat([rollouts.inputs["features"], rollouts.inputs["proprio"]], dim=-1)


def final_states_of(rollouts: Rollouts) -> Tensor:
    """(B, S) the state after the last decision."""
    return torch.cat([rollouts.final["features"], rollouts.final["proprio"]], dim=-1)
