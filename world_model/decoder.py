"""A small decoder from the shared state back to camera frames: only for people's eyes, never for training the policy.

Shape legend: N frames, S state = features + proprioception, V frame side, C cameras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Fitting of the decoder."""

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(
                f"expected at least 1 step and a batch of at least 1, got steps={self.steps}, batch_size={self.batch_size}"
            )
        if self.learning_rate <= 0:
            raise ValueError(f"expected decoder.learning_rate above 0, got {self.learning_rate}")


class FrameDecoder(nn.Module):
    """State (N, S) -> frames (N, V, V, 3 C) in [0, 1], all cameras side by side in the channels."""

    def __init__(self, state_size: int, cameras: tuple[str, ...], side: int) -> None:
        super().__init__()
        if side % 16:
            raise ValueError(f"expected a frame side divisible by 16, got {side}")
        self.cameras, self.corner = cameras, side // 16
        self.enter = nn.Linear(state_size, 96 * self.corner**2)
        self.grow = nn.Sequential(
            nn.SiLU(),
            nn.ConvTranspose2d(96, 64, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(32, 24, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(24, 3 * len(cameras), 4, stride=2, padding=1),
        )

    def forward(self, state: Tensor) -> Tensor:
        """Frames as floats; see the class."""
        grid = self.enter(state).unflatten(1, (96, self.corner, self.corner))
        return self.grow(grid).sigmoid().permute(0, 2, 3, 1)

    @torch.no_grad()
    def frames(self, state: Tensor) -> dict[str, Tensor]:
        """Camera -> (N, V, V, 3) uint8, on the CPU."""
        pixels = (self(state.to(self.enter.weight.device)) * 255).round().to(torch.uint8).cpu()
        return {camera: pixels[..., 3 * i : 3 * i + 3] for i, camera in enumerate(self.cameras)}


def fit_decoder(
    decoder: FrameDecoder,
    state: Tensor,
    frames: dict[str, Tensor],
    config: DecoderConfig,
    *,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Fit on pairs of state (N, S) and frames camera -> (N, V, V, 3) uint8; returns the last mean absolute error in [0, 1].

    Pixels that differ from the mean picture (arm, objects) count more: they are a twentieth of the frame and all of the story.
    """
    target = torch.cat([frames[camera] for camera in decoder.cameras], dim=-1)
    device = decoder.enter.weight.device
    background = (target.float().mean(0) / 255).to(device)
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config.steps)
    generator = torch.Generator().manual_seed(seed)
    error = 0.0
    for step in range(config.steps):
        rows = torch.randint(0, len(state), (config.batch_size,), generator=generator)
        wanted = target[rows].to(device).float() / 255
        difference = (decoder(state[rows].to(device)) - wanted).abs()
        weight = 1.0 + 4.0 * ((wanted - background).abs() > 0.06)
        loss = (difference * weight).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        error = difference.mean().item()
        on_step(step + 1, error)
    return error
