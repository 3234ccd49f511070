"""Independent linear layers as one batched product: what ensembles of small networks are made of.

Shape legend: E members, B rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MemberLinear(nn.Module):
    """E independent linear layers as one batched product: (E, B, I) -> (E, B, O)."""

    def __init__(self, members: int, inputs: int, outputs: int, *, zero: bool = False) -> None:
        super().__init__()
        scale = 0.0 if zero else inputs**-0.5
        self.weight = nn.Parameter(torch.randn(members, inputs, outputs) * scale)
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, values: Tensor) -> Tensor:
        """Batched affine map."""
        return torch.baddbmm(self.bias, values, self.weight)
