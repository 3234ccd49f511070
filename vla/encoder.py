"""From camera frames, proprioception and an instruction to the latent that policy and world model share.

Shape legend: B rows, S image side, C cameras, P proprioception, L language embedding, D token width, F = readouts x D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from wmrl.types import Observation

MIN_STD = 1e-3
"""Floor of normalisation scales: a dimension that never moved in the data must not blow up when it does (pain report D08)."""


@dataclass(frozen=True)
class EncoderConfig:
    """Size of the encoder; the defaults make 0.4 M parameters, which two cores train in minutes."""

    image_size: int = 64
    cameras: tuple[str, ...] = ("agentview", "wrist")
    proprio_size: int = 0
    language_size: int = 384
    object_size: int = 6
    token_size: int = 96
    layers: int = 2
    heads: int = 4
    readouts: int = 2

    def __post_init__(self) -> None:
        if self.image_size % 16:
            raise ValueError(f"expected an image size divisible by 16 (three strided stages), got {self.image_size}")
        if not self.cameras:
            raise ValueError("expected at least one camera for a vision-language-action policy, got none")
        if self.token_size % self.heads:
            raise ValueError(f"expected token_size divisible by heads, got {self.token_size} and {self.heads}")

    @property
    def feature_size(self) -> int:
        """F, the length of the shared latent."""
        return self.readouts * self.token_size


class ImageTokens(nn.Module):
    """One camera's frame (B, S, S, 3) uint8 as (S/16)^2 tokens of width D."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.token_size
        self.stages = nn.Sequential(
            nn.Conv2d(3, 16, 8, stride=4, padding=2),
            nn.GELU(),
            nn.Conv2d(16, 48, 4, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(48, width, 4, stride=2, padding=1),
        )
        self.place = nn.Parameter(torch.randn((config.image_size // 16) ** 2, width) * 0.02)

    def forward(self, frames: Tensor) -> Tensor:
        """(B, S, S, 3) uint8 RGB, upright -> (B, N, D). The only place where frames become floats."""
        pixels = frames.permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
        return self.stages(pixels).flatten(2).transpose(1, 2) + self.place


class VisionLanguageEncoder(nn.Module):
    """A small transformer over image, proprioception and instruction tokens; its readout tokens are the features.

    Trained end to end by imitation, frozen during reinforcement learning, so that a world model may predict its output.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if config.proprio_size < 1:
            raise ValueError(f"expected a positive proprio_size, got {config.proprio_size}; take it from the dataset")
        self.config = config
        width = config.token_size
        self.images = nn.ModuleDict({camera: ImageTokens(config) for camera in config.cameras})
        self.proprio = nn.Linear(config.proprio_size, width)
        self.language = nn.Linear(config.language_size, width)
        self.readout = nn.Parameter(torch.randn(config.readouts, width) * 0.02)
        self.goal = nn.Linear(config.language_size, config.readouts * width)
        layer = nn.TransformerEncoderLayer(
            width, config.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.trunk = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.objects = nn.Linear(config.feature_size, config.object_size)
        self.register_buffer("proprio_mean", torch.zeros(config.proprio_size))
        self.register_buffer("proprio_std", torch.ones(config.proprio_size))

    def normalise(self, proprio: Tensor) -> Tensor:
        """(…, P) in sensor units -> zero mean, unit deviation over the demonstrations, clamped to +-8."""
        return ((proprio - self.proprio_mean) / self.proprio_std).clamp(-8.0, 8.0)

    def set_statistics(self, proprio: Tensor) -> None:
        """Take normalisation from data (N, P); constant dimensions get the floor `MIN_STD`."""
        self.proprio_mean.copy_(proprio.mean(0))
        self.proprio_std.copy_(proprio.std(0, unbiased=False).clamp_min(MIN_STD))

    def forward(self, frames: dict[str, Tensor], proprio: Tensor, language: Tensor) -> Tensor:
        """Frames camera -> (B, S, S, 3) uint8, normalised proprio (B, P), language (B, L) -> features (B, F)."""
        tokens = [self.images[camera](frames[camera]) for camera in self.config.cameras]
        # unit-length sentence vectors have entries of about 0.05: scaled to unit deviation like the other inputs
        words = language * self.config.language_size**0.5
        # the instruction also forms the readout's queries: where to look depends on it, and few demonstrations teach that quickly
        readout = self.readout + self.goal(words).unflatten(1, self.readout.shape)
        tokens += [self.proprio(proprio)[:, None], self.language(words)[:, None], readout]
        trunk = self.trunk(torch.cat(tokens, dim=1))
        return self.norm(trunk[:, -self.config.readouts :]).flatten(1)

    def predict_objects(self, features: Tensor) -> Tensor:
        """Auxiliary object positions (B, O) in metres / 0.1, read from the features (a label of simulation only)."""
        return self.objects(features)


def shift_frames(frames: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Random shift of (B, S, S, 3) frames by up to `pixels`, edges repeated (DrQ, arXiv 2004.13649)."""
    if pixels == 0:
        return frames
    batch, side = frames.shape[:2]
    padded = functional.pad(frames.permute(0, 3, 1, 2).float(), (pixels,) * 4, mode="replicate").to(frames.dtype)
    offset = torch.randint(0, 2 * pixels + 1, (batch, 2), generator=generator)
    rows = offset[:, :1] + torch.arange(side)
    columns = offset[:, 1:] + torch.arange(side)
    picked = padded[torch.arange(batch)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked


def frames_of(observation: Observation, cameras: Sequence[str]) -> dict[str, Tensor]:
    """The frames that the encoder needs, checked."""
    missing = [camera for camera in cameras if f"pixels/{camera}" not in observation]
    if missing:
        have = sorted(key.removeprefix("pixels/") for key in observation if key.startswith("pixels/"))
        raise ValueError(f"expected frames of cameras {list(cameras)}, the observation lacks {missing} and has {have}; add them to `cameras`")
    return {camera: observation[f"pixels/{camera}"] for camera in cameras}
