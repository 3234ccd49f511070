"""Imitation: end-to-end behaviour cloning of encoder and head on demonstrations.

Shape legend: M minibatch, H control steps, A action dimensions, K = H x A tokens, N bins, O object numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vla.demonstrations import Demonstrations
from vla.encoder import shift_frames
from vla.policy import ChunkPolicy
from wmrl.device import autocast

MIN_SPREAD = 1e-3
"""Floor of the scale of the auxiliary object targets."""


@dataclass(frozen=True)
class ImitationConfig:
    """Behaviour cloning. Steps, batch and rate are the prototype's; 100 steps of 64 took 10 s on two idle cores."""

    steps: int = 1000
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    label_width: float = 0.7
    """Standard deviation of the soft labels, in bins: neighbouring bins are nearly right."""
    object_weight: float = 1.0
    """Weight of the auxiliary loss that reads object positions (simulator labels of the demonstrations) from the features."""
    shift_pixels: int = 0
    """Random shifts move the picture but not the goal: on fixed cameras they cost more precision than they bring generality."""
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(
                f"expected at least 1 step and a batch of at least 1, got steps={self.steps}, batch_size={self.batch_size}"
            )
        if self.learning_rate <= 0 or self.label_width <= 0:
            raise ValueError(
                f"expected positive learning_rate and label_width, got {self.learning_rate} and {self.label_width}"
            )
        for name in ("weight_decay", "object_weight", "shift_pixels", "max_gradient_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")


class Imitation:
    """Owns the optimiser; every minibatch is drawn from (seed, step), so a resumed run repeats the uninterrupted one.

    The data stay on the CPU, minibatches go to the policy's device. `precision` (see `wmrl.device.autocast`) is that of the
    forward passes; positions, losses and weights stay float32.
    """

    def __init__(
        self, policy: ChunkPolicy, data: Demonstrations, config: ImitationConfig, *, seed: int, precision: str = "off"
    ) -> None:
        check_compatible(policy, data)
        self.policy, self.data, self.config, self.seed, self.precision = policy, data, config, seed, precision
        policy.encoder.set_statistics(data.frames, data.proprio)
        self.proprio = policy.encoder.normalise(data.proprio.to(policy.device)).cpu()
        self.targets, self.present = data.chunks(policy.config.chunk)
        spread = data.objects.std(0, unbiased=False).clamp_min(MIN_SPREAD)
        self.objects = (data.objects - data.objects.mean(0)) / spread
        self.language = policy.sentences(data.instructions)
        self.optimiser = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, config.steps)
        self.step_number = 0

    def run(self, on_step: Callable[[int, dict[str, float]], None]) -> None:
        """Train to the last step; `on_step(step, losses)` after each."""
        self.policy.train()
        while self.step_number < self.config.steps:
            losses = self.step()
            on_step(self.step_number, losses)
        self.policy.eval()

    def step(self) -> dict[str, float]:
        """One gradient step; returns the losses."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step_number)
        rows = torch.randint(0, len(self.data), (self.config.batch_size,), generator=generator)
        device, width = self.policy.device, self.config.label_width
        frames = {
            name: shift_frames(self.data.frames[name][rows], self.config.shift_pixels, generator).to(device)
            for name in self.policy.config.encoder.cameras
        }
        proprio, language = self.proprio[rows].to(device), self.language[self.data.episode[rows]].to(device)
        with autocast(device, self.precision):
            features = self.policy.encoder(frames, proprio, language)
            logits = self.policy.head(features, proprio)
            objects = self.policy.encoder.predict_objects(features)
        action_loss = soft_cross_entropy(logits.float(), self.targets[rows].to(device), self.present[rows].to(device), width)
        object_loss = functional.mse_loss(objects.float(), self.objects[rows].to(device))
        loss = action_loss + self.config.object_weight * object_loss
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_gradient_norm, error_if_nonfinite=True)
        self.optimiser.step()
        self.scheduler.step()
        self.step_number += 1
        return {"action_loss": action_loss.item(), "object_error": object_loss.sqrt().item()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "step": self.step_number,
            "policy": self.policy.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.step_number = int(state["step"])
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scheduler.load_state_dict(state["scheduler"])


def soft_cross_entropy(logits: Tensor, actions: Tensor, present: Tensor, width: float) -> Tensor:
    """Cross-entropy of logits (M, K, N) with labels smeared over neighbouring bins; actions (M, H, A), present (M, H)."""
    bins = logits.shape[-1]
    position = (actions.flatten(1).clamp(-1.0, 1.0) + 1.0) * 0.5 * (bins - 1)
    distance = position[..., None] - torch.arange(bins, device=logits.device)
    labels = (-0.5 * (distance / width) ** 2).softmax(-1)
    loss = -(labels * logits.log_softmax(-1)).sum(-1).unflatten(1, actions.shape[1:])
    return (loss * present[..., None]).sum() / (present.sum() * actions.shape[2]).clamp_min(1)


def check_compatible(policy: ChunkPolicy, data: Demonstrations) -> None:
    """Refuse data whose features do not fit the policy, before any training. Cameras that the policy does not use may be
    there."""
    config, encoder = policy.config, policy.config.encoder
    expected = {"cameras": list(encoder.cameras), "action_size": config.action_size}
    expected |= {"proprio_size": encoder.proprio_size, "image_size": encoder.image_size}
    frames = {camera: data.frames[camera] for camera in encoder.cameras if camera in data.frames}
    got = {"cameras": list(frames), "action_size": data.actions.shape[1], "proprio_size": data.proprio.shape[1]}
    sizes = [tensor.shape[1] for tensor in frames.values() if tensor.shape[1] != encoder.image_size]
    got["image_size"] = sizes[0] if sizes else encoder.image_size
    wrong = {name: (expected[name], got[name]) for name in expected if expected[name] != got[name]}
    if wrong:
        text = "; ".join(f"{name}: the policy expects {want}, the dataset has {have}" for name, (want, have) in wrong.items())
        raise ValueError(f"the dataset does not fit the policy: {text}. Record it again or change the policy's configuration")
