"""The learned step of a whole action chunk: straight lines in closed form, and an ensemble of small networks for the rest.

Shape legend: E ensemble members, B rows, F features, L low state (proprioception and what else is known of the scene),
S = F + L state, H control steps of a chunk, A action dimensions, C = H x A numbers of a chunk, D = L + 2 A regressors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wmrl.device import autocast
from wmrl.ensemble import MemberLinear

LIMIT = 6.0
"""Normalised inputs are clamped here, in units of their deviation, so that imagination far from the data stays bounded."""


class ChunkEnsemble(nn.Module):
    """Predicts, per member, the state after a chunk and the probability that the task is solved within it.

    The change of the low state is ridge regression on the low state, the mean and the slope of the chunk; that of the features
    also on the features. Members add small networks to it, all members to one line. Measured on 128 rollouts: the cube relative
    to the grip is 0.75 to 1.1 cm off after one chunk, and 1.45 to 2.0 cm with a network of 256 units alone (docs/log.md).

    Success is read from the low state and the whole chunk, since averages lose the timing of the gripper; not from the
    features, which at this number of rollouts only teach it the scenes by heart. `precision` (see `wmrl.device.autocast`) is
    that of the members' layers; states, lines, logits and losses stay float32.
    """

    state_mean: Tensor
    state_scale: Tensor
    change_scale: Tensor
    feature_line: Tensor
    low_line: Tensor
    summary: Tensor

    def __init__(
        self, feature_size: int, low_size: int, chunk: tuple[int, int], *, members: int, width: int, precision: str = "off"
    ) -> None:
        super().__init__()
        self.feature_size, self.chunk, self.members, self.precision = feature_size, chunk, members, precision
        steps, actions = chunk
        regressors, state_size = low_size + 2 * actions, feature_size + low_size
        self.change = _small_network(members, regressors, width, state_size)
        self.outcome = _small_network(members, low_size + steps * actions, width, 1)
        for name, sizes in {
            "state_mean": (state_size,),
            "feature_line": (1 + regressors + feature_size, feature_size),
            "low_line": (1 + regressors, low_size),
        }.items():
            self.register_buffer(name, torch.zeros(sizes))
        self.register_buffer("state_scale", torch.ones(state_size))
        self.register_buffer("change_scale", torch.ones(state_size))
        slope = torch.linspace(-0.5, 0.5, steps) / 2 if steps > 1 else torch.zeros(1)
        self.register_buffer("summary", torch.stack([torch.full((steps,), 1.0 / steps), slope]))

    def forward(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """state (E, B, S), chunk (E, B, C) -> next state (E, B, S), success logit (E, B)."""
        regressors, features, outcome = self.inputs(state, chunk)
        change, logit = self.residual(regressors, outcome)
        return state + (self.line(regressors, features) + change) * self.change_scale, logit

    @torch.no_grad()
    def set_base_rate(self, rate: float) -> None:
        """Let the outcome of untrained members be this probability."""
        last = self.outcome[-1]
        assert isinstance(last, MemberLinear)
        last.bias.fill_(math.log(rate / (1.0 - rate)))

    def inputs(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the parts read of (..., S) and (..., C): regressors (..., D), normalised features (..., F), inputs of the
        outcome (..., L + C)."""
        normalised = ((state - self.state_mean) / self.state_scale).clamp(-LIMIT, LIMIT)
        features, low = normalised[..., : self.feature_size], normalised[..., self.feature_size :]
        summary = torch.einsum("nh,...ha->...na", self.summary, chunk.unflatten(-1, self.chunk)).flatten(-2)
        return torch.cat([low, summary], dim=-1), features, torch.cat([low, chunk], dim=-1)

    def line(self, regressors: Tensor, features: Tensor) -> Tensor:
        """(..., D), (..., F) -> change of state (..., S) in units of its own deviation, the part without members."""
        low = regressors @ self.low_line[1:] + self.low_line[0]
        line = self.feature_line
        return torch.cat([torch.cat([regressors, features], dim=-1) @ line[1:] + line[0], low], dim=-1)

    def residual(self, regressors: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
        """(E, B, D), (E, B, L + C) -> what the members add to the change (E, B, S), success logit (E, B)."""
        with autocast(regressors.device, self.precision):
            change, logit = self.change(regressors), self.outcome(outcome)[..., 0]
        return change.float(), logit.float()

    @torch.no_grad()
    def solve(self, regressors: Tensor, features: Tensor, change: Tensor, *, low_ridge: float, feature_ridge: float) -> None:
        """Fit the lines to normalised changes (B, S) in closed form."""
        one = torch.ones_like(regressors[:, :1])
        low = torch.cat([one, regressors], dim=1)
        self.low_line.copy_(_ridge(low, change[:, self.feature_size :], low_ridge))
        self.feature_line.copy_(_ridge(torch.cat([low, features], dim=1), change[:, : self.feature_size], feature_ridge))

    @torch.no_grad()
    def imagine(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """state (B, S), chunk (B, C) -> mean next state (B, S), success probability by member (E, B); CPU tensors in and out,
        wherever the weights are."""
        device = self.state_mean.device
        state, chunk = state.to(device), chunk.to(device)
        regressors, features, outcome = self.inputs(state, chunk)
        change, logit = self.residual(*(rows.expand(self.members, -1, -1) for rows in (regressors, outcome)))
        following = state + (self.line(regressors, features) + change.mean(0)) * self.change_scale
        return following.cpu(), logit.sigmoid().cpu()


def _small_network(members: int, inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers; outputs begin at zero."""
    return nn.Sequential(
        MemberLinear(members, inputs, width),
        nn.SiLU(),
        MemberLinear(members, width, width),
        nn.SiLU(),
        MemberLinear(members, width, outputs, zero=True),
    )


def _ridge(inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
    """(X'X + weight)^-1 X'Y in float64, X (B, D) with the constant first, which is not penalised, Y (B, O) -> (D, O) (Hoerl and
    Kennard 1970)."""
    inputs, targets = inputs.double(), targets.double()
    penalty = inputs.new_full((inputs.shape[1],), weight)
    penalty[0] = 1e-6
    information = inputs.T @ inputs + torch.diag(penalty)
    return torch.linalg.solve(information, inputs.T @ targets).float()


def change_loss(predicted: Tensor, target: Tensor, *, feature_size: int, feature_weight: float) -> Tensor:
    """Smooth-L1 of normalised changes (..., S) by row (...); features count less, since the outcome does not read them."""
    weight = torch.ones(target.shape[-1], device=target.device)
    weight[:feature_size] = feature_weight
    return (functional.smooth_l1_loss(predicted, target, reduction="none") * weight).mean(-1)
