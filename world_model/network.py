"""An ensemble of small residual networks that predict a whole action chunk in one call.

Shape legend: E ensemble members, B rows, F features, P proprioception, S = F + P state, C = H x A numbers of a chunk, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from wmrl.device import autocast
from wmrl.ensemble import MemberLinear


class MemberBlock(nn.Module):
    """Pre-LayerNorm residual block. LayerNorm bounds extrapolation (NEUBAY, arXiv 2512.04341)."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.first = MemberLinear(members, width, width)
        self.second = MemberLinear(members, width, width, zero=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """(E, B, W) -> (E, B, W)."""
        normed = functional.layer_norm(hidden, hidden.shape[-1:])
        return hidden + self.second(functional.silu(self.first(normed)))


class ChunkEnsemble(nn.Module):
    """Predicts, per member, the state after a chunk and the probability that the task is solved within it.

    The success head reads (state, action) rather than the predicted next state: the prototype measured a replay AUROC of
    0.87-0.90 with the former and 0.79-0.83 with the latter. The whole chunk goes in, since averages lose the timing of the
    gripper. `precision` (see `wmrl.device.autocast`) is that of the layers; states, logits and losses stay float32.
    """

    state_mean: Tensor
    state_scale: Tensor
    change_scale: Tensor

    def __init__(
        self, state_size: int, chunk_size: int, *, members: int, width: int, blocks: int, precision: str = "off"
    ) -> None:
        super().__init__()
        self.members, self.precision = members, precision
        self.enter = MemberLinear(members, state_size + chunk_size, width)
        self.blocks = nn.Sequential(*[MemberBlock(members, width) for _ in range(blocks)])
        self.change = MemberLinear(members, width, state_size, zero=True)
        self.outcome_enter = MemberLinear(members, state_size + chunk_size, width)
        self.outcome_blocks = nn.Sequential(MemberBlock(members, width))
        self.outcome = MemberLinear(members, width, 1, zero=True)
        self.register_buffer("state_mean", torch.zeros(state_size))
        self.register_buffer("state_scale", torch.ones(state_size))
        self.register_buffer("change_scale", torch.ones(state_size))

    def forward(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """state (E, B, S), chunk (E, B, C) -> next state (E, B, S), success logit (E, B)."""
        change, logit = self.normalised(state, chunk)
        return state + change * self.change_scale, logit

    def normalised(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, with the change in units of its own deviation, which is what the loss compares."""
        inputs = torch.cat([((state - self.state_mean) / self.state_scale).clamp(-8.0, 8.0), chunk], dim=-1)
        with autocast(state.device, self.precision):
            hidden = functional.layer_norm(self.blocks(self.enter(inputs)), (self.enter.bias.shape[-1],))
            outcome = functional.layer_norm(self.outcome_blocks(self.outcome_enter(inputs)), (self.enter.bias.shape[-1],))
            change, logit = self.change(hidden), self.outcome(outcome)[..., 0]
        return change.float(), logit.float()

    @torch.no_grad()
    def imagine(self, state: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """state (B, S), chunk (B, C) -> mean next state (B, S), success probability by member (E, B); CPU tensors in and out,
        wherever the weights are."""
        device = self.state_mean.device
        rows = [tensor.to(device).expand(self.members, -1, -1) for tensor in (state, chunk)]
        following, logit = self(*rows)
        return following.mean(0).cpu(), logit.sigmoid().cpu()
