"""Demonstrations in memory: every recorded control step, and the windows of actions that imitation learns from.

Shape legend: N control steps over all episodes, E episodes, S image side, P proprioception, O object numbers, H chunk length, A
action size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Demonstrations:
    """frames camera -> (N, S, S, 3) uint8; proprio (N, P); actions (N, A), the expert's commands; objects (N, O) simulator
    labels; episode (N,) index, ascending; instructions: E texts; seeds: E start seeds (for the leak check)."""

    frames: dict[str, Tensor]
    proprio: Tensor
    actions: Tensor
    objects: Tensor
    episode: Tensor
    instructions: tuple[str, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        steps = len(self.episode)
        for name, tensor in {**self.frames, "proprio": self.proprio, "actions": self.actions, "objects": self.objects}.items():
            if len(tensor) != steps:
                raise ValueError(f"expected {steps} rows of {name}, one per control step, got {len(tensor)}")
            if not torch.isfinite(tensor.float()).all():
                raise ValueError(f"expected finite numbers in {name}, found NaN or infinity; record the demonstrations again")

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def num_episodes(self) -> int:
        """Number of demonstrations."""
        return len(self.instructions)

    def chunks(self, length: int) -> tuple[Tensor, Tensor]:
        """Windows (N, H, A) of the actions from each step on, and (N, H) bool, false where the episode had ended (the last
        action is repeated there)."""
        if length < 1:
            raise ValueError(f"expected a chunk of at least 1 control step, got {length}")
        index = torch.arange(len(self))[:, None] + torch.arange(length)
        last = torch.searchsorted(self.episode, self.episode, right=True)[:, None] - 1
        return self.actions[index.minimum(last)], index <= last

    def constant_dimensions(self) -> list[str]:
        """Names of action and state dimensions that never change: harmless here, but worth a warning (pain report D08)."""
        names = []
        for feature, tensor in (("action", self.actions), ("observation.state", self.proprio)):
            spread = tensor.max(0).values - tensor.min(0).values
            names += [f"{feature}[{int(i)}]" for i in torch.nonzero(spread == 0)[:, 0]]
        return names
