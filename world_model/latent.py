"""The latent world model: from the policy's features, the low state and one action chunk to what comes next and the outcome.

Shape legend: B rollouts, T decisions, N transitions, E ensemble members, F features, L low state (proprioception and the
privileged entries), S = F + L, H control steps of a chunk, A action dimensions, C = H x A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wmrl.types import Estimate, Observation, Rollouts, Start
from world_model.imagination import ImaginedEnvironment
from world_model.network import ChunkEnsemble, change_loss

MIN_SCALE = 1e-3
"""Floor of normalisation scales, so that a constant dimension stays harmless."""


@dataclass(frozen=True)
class LatentConfig:
    """Size and fitting of the ensemble, which is fitted afresh every time: a refit from old weights holds on to old rollouts.

    privileged names observation entries of the simulator that the model may learn from and predict beside proprioception; no
    policy reads them. own_share: share of the rows that a member sees. feature_weight: of a feature's change in the loss,
    relative to that of a number of the low state. *_ridge: weight of the penalty on the straight lines.
    """

    privileged: tuple[str, ...] = ("goal",)
    members: int = 4
    width: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    batch_size: int = 256
    passes: float = 40.0
    """How often a fit sees every transition; never fewer gradient steps than min_steps."""
    min_steps: int = 300
    own_share: float = 0.8
    feature_weight: float = 0.2
    low_ridge: float = 3.0
    feature_ridge: float = 100.0
    input_noise: float = 0.1
    """Deviation of the noise on the members' inputs, in units of their deviation: they must survive the model's own errors."""

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"expected at least 2 ensemble members (their spread is the uncertainty), got {self.members}")
        for name in ("width", "batch_size", "min_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        for name in ("learning_rate", "passes", "low_ridge", "feature_ridge"):
            if getattr(self, name) <= 0:
                raise ValueError(f"expected {name} above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "feature_weight", "input_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if not 0 < self.own_share <= 1:
            raise ValueError(f"expected own_share in (0, 1], got {self.own_share}")


class LatentWorldModel:
    """Implements `wmrl.types.ImaginedWorld` for robots. `sizes` holds the width of every observation entry that makes the
    state, features first; `beginnings(starts)` gives them at real states. The ensemble lives on `device` and computes in
    `precision`; rollouts come and go on the CPU."""

    def __init__(
        self,
        config: LatentConfig,
        *,
        sizes: Mapping[str, int],
        chunk: tuple[int, int],
        horizon: int,
        beginnings: Callable[[Sequence[Start]], Observation],
        width: int = 256,
        device: torch.device | str = "cpu",
        precision: str = "off",
    ) -> None:
        assert next(iter(sizes)) == "features", "features come first in the state"
        self.config, self.horizon, self.beginnings, self.width = config, horizon, beginnings, width
        self.sizes, self.chunk, self.device, self.precision = dict(sizes), chunk, torch.device(device), precision
        self.network = self._fresh_network(0)
        self.version = 0

    def _fresh_network(self, seed: int) -> ChunkEnsemble:
        low_size = sum(self.sizes.values()) - self.sizes["features"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            network = ChunkEnsemble(
                self.sizes["features"],
                low_size,
                self.chunk,
                members=self.config.members,
                width=self.config.width,
                precision=self.precision,
            )
        return network.to(self.device)

    def environment(self) -> ImaginedEnvironment:
        """The imagined world; it always uses the newest fit."""
        return ImaginedEnvironment(
            self.network, sizes=self.sizes, horizon=self.horizon, beginnings=self.beginnings, width=self.width
        )

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
        state = states_of(rollouts, self.sizes)[:, 0]
        hazards = []
        for step in range(rollouts.rewards.shape[1]):
            state, hazard = self.network.imagine(state, rollouts.actions[:, step].flatten(1))
            hazards.append(hazard * (rollouts.mask[:, step] > 0))
        return torch.stack(hazards, dim=-1)

    def fit(self, rollouts: Rollouts, *, seed: int) -> dict[str, float]:
        """Learn from all real rollouts so far, failures included: scales, then the lines, then the members."""
        data = Transitions.of(rollouts, self.sizes).to(self.device)
        if not len(data):
            raise ValueError("expected real rollouts with an outcome to fit a world model, got none")
        network = self._fresh_network(seed)
        change = self._fit_lines(network, data)
        steps = max(self.config.min_steps, round(self.config.passes * len(data) / self.config.batch_size))
        losses = self._fit_members(network, data, change, steps=steps, generator=torch.Generator().manual_seed(seed))
        self.network.load_state_dict(network.state_dict())  # in place: environments made earlier see the newest fit
        self.version += 1
        return {**losses, "transitions": float(len(data)), "fit_steps": float(steps)}

    def _fit_lines(self, network: ChunkEnsemble, data: Transitions) -> Tensor:
        """Set the scales and solve the lines; returns the changes (N, S) in units of their deviation."""
        moved = data.continues > 0
        network.state_mean.copy_(data.state.mean(0))
        network.state_scale.copy_(data.state.std(0, unbiased=False).clamp_min(MIN_SCALE))
        change = data.following - data.state
        if bool(moved.any()):
            network.change_scale.copy_(change[moved].std(0, unbiased=False).clamp_min(MIN_SCALE))
        change = change / network.change_scale
        regressors, features, _ = network.inputs(data.state, data.chunk)
        ridges = {"low_ridge": self.config.low_ridge, "feature_ridge": self.config.feature_ridge}
        network.solve(regressors[moved], features[moved], change[moved], **ridges)
        rate = data.success.mean().clamp(0.01, 0.99)
        # begin at the base rate: a model that starts at 0.5 believes in everything
        network.set_base_rate(rate.item())
        return change

    def _fit_members(
        self, network: ChunkEnsemble, data: Transitions, change: Tensor, *, steps: int, generator: torch.Generator
    ) -> dict[str, float]:
        """Gradient steps of all members at once, each on its own share of the rows; returns the mean losses."""
        config = self.config
        regressors, features, outcome = network.inputs(data.state, data.chunk)
        line = network.line(regressors, features)
        owned = torch.rand(config.members, len(data), generator=generator).argsort(1)
        owned = owned[:, : max(1, round(config.own_share * len(data)))]
        optimiser = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=config.learning_rate / 20)
        sums = torch.zeros(2, device=self.device)
        for _ in range(steps):
            drawn = torch.randint(0, owned.shape[1], (config.members, config.batch_size), generator=generator)
            rows = owned.gather(1, drawn).to(self.device)
            noisy = [self._noisy(inputs[rows], generator) for inputs in (regressors, outcome)]
            residual, logit = network.residual(*noisy)
            error = change_loss(
                line[rows] + residual,
                change[rows],
                feature_size=network.feature_size,
                feature_weight=config.feature_weight,
            )
            moved = data.continues[rows]
            losses = torch.stack(
                [
                    (error * moved).sum() / moved.sum().clamp_min(1.0),
                    functional.binary_cross_entropy_with_logits(logit, data.success[rows]),
                ]
            )
            optimiser.zero_grad(set_to_none=True)
            losses.sum().backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0, error_if_nonfinite=True)
            optimiser.step()
            schedule.step()
            sums += losses.detach()
        change_mean, outcome_mean = (sums / steps).cpu().tolist()
        return {"change_loss": change_mean, "outcome_loss": outcome_mean}

    def _noisy(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(inputs.shape, generator=generator).to(self.device)
        return inputs + noise * self.config.input_noise

    def state_dict(self) -> dict[str, Any]:
        """Weights and version."""
        return {"network": self.network.state_dict(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.network.load_state_dict(state["network"])
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

    def to(self, device: torch.device) -> Transitions:
        """The same with every tensor on `device`."""
        return Transitions(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @staticmethod
    def of(rollouts: Rollouts, names: Iterable[str]) -> Transitions:
        """Every decision that was really taken, the state made of the entries `names`; rollouts without an outcome have none.
        A chunk that ended in success stops midway: its label counts, its end state does not."""
        state = states_of(rollouts, names)
        taken = (rollouts.mask > 0) & rollouts.valid()[:, None]
        last = torch.cat([_recorded(rollouts.final, name) for name in names], dim=-1)[:, None]
        ends = taken & ~torch.cat([taken[:, 1:], torch.zeros_like(taken[:, :1])], dim=1)
        following = torch.where(ends[..., None], last, torch.cat([state[:, 1:], last], dim=1))
        success = (rollouts.rewards > 0).float()[taken]
        return Transitions(state[taken], rollouts.actions.flatten(2)[taken], following[taken], 1 - success, success)


def states_of(rollouts: Rollouts, names: Iterable[str]) -> Tensor:
    """(B, T, S) what the model sees of each decision."""
    return torch.cat([_recorded(rollouts.inputs, name) for name in names], dim=-1)


def _recorded(observation: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in observation:
        raise ValueError(
            f"expected rollouts that record {name!r} for the world model, found {sorted(observation)}; "
            "collect them again, or change world_model.latent.privileged"
        )
    return observation[name].float()
