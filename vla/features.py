"""What the world model's bias on robot rollouts may depend on: the only thing the correction core learns about robots.

Shape legend: B rollouts, T decisions, H control steps, A action dimensions, Fd features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wmrl.types import Rollouts

EARLY = 3
"""Decisions that count. The scripted expert needs 23 control steps at least, three chunks, so these features cannot know the
outcome; a real rollout that ends with its success would otherwise betray it by its length."""

NUM_FEATURES = 8


def early_behaviour(rollouts: Rollouts) -> Tensor:
    """(B, 8): mean commanded translation (3) and gripper (1) over the first decisions; the same of the last of them alone
    (4)."""
    early = rollouts.actions[:, :EARLY][..., [0, 1, 2, 6]].float()
    return torch.cat([early.mean((1, 2)), early[:, -1].mean(1)], dim=-1)
