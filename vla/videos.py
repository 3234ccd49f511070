"""Videos for the report: the greedy policy in the real world, and twins side by side: a real and an imagined rollout, both
sampled, from one start with one noise (their decisions part as soon as what they see does).

Shape legend: N frames, V side of a video frame, T decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla.evaluation import NOISE_SEED
from vla.policy import ChunkPolicy
from vla.session import Session
from vla.world_model import FRAMES
from wmrl.collect import collect
from wmrl.noise import derive_seed
from wmrl.progress import Progress
from wmrl.state_files import load_rollouts
from wmrl.types import Environment, Rollouts, Start
from world_model.decoder import FrameDecoder, fit_decoder
from world_model.latent import LatentWorldModel, states_of

DECODED = ("features", "proprio")
"""What the decoder reads: what policy and world model share, so that the picture shows what the policy could know."""

SIZE = 256
DECISIONS_PER_SECOND = 2.5
"""A chunk of 8 control steps at 20 Hz."""


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Frames (N, V, V, 3) uint8 as H.264, readable by every browser."""
    import imageio.v3 as iio

    path.parent.mkdir(parents=True, exist_ok=True)
    iio.imwrite(path, frames, plugin="pyav", codec="libx264", fps=round(fps) or 1)


def real_videos(session: Session, folder: Path, policy: ChunkPolicy, starts: Sequence[Start], name: str) -> None:
    """One full-quality video per start of the greedy policy in the real world."""
    environment = session.environment
    environment.record_frames(list(range(len(starts))), size=SIZE, full=True)
    rollouts = collect(session.encoded(policy), policy, starts, [0] * len(starts), seed=NOISE_SEED, greedy=True)
    session.ledger.record("videos", rollouts, free=True)
    frames = environment.frames()
    environment.record_frames([])
    for row, start in enumerate(starts):
        outcome = "success" if rollouts.returns()[row] > 0.5 else "failure"
        path = folder / f"{name} - real - {start.instruction} - start {start.seed} - {outcome}.mp4"
        write_video(path, frames[row], session.task.control_frequency)


def fitted_decoder(session: Session) -> FrameDecoder:
    """A decoder of the shared state, fitted on the frames of the base rollouts."""
    rollouts = load_rollouts(session.world_model / "base.safetensors")
    taken = rollouts.mask > 0
    frames = {name.removeprefix("pixels/"): rollouts.inputs[name][taken] for name in FRAMES}
    cameras = tuple(frames)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(session.config.seed, "decoder weights"))
        decoder = FrameDecoder(states_of(rollouts, DECODED).shape[-1], cameras, frames[cameras[0]].shape[1]).to(session.device)
    config = session.config.decoder
    with Progress("decoder", config.steps) as progress:
        fit_decoder(
            decoder,
            states_of(rollouts, DECODED)[taken],
            frames,
            config,
            seed=derive_seed(session.config.seed, "decoder") % 2**31,
            on_step=lambda step, error: progress.update(step, {"error": error}),
        )
    return decoder


def twins(
    session: Session, policy: ChunkPolicy, imagination: Environment, starts: Sequence[Start]
) -> tuple[Rollouts, Rollouts]:
    """Real rollouts with their frames, and imagined ones from the same starts with the same noise."""
    members = [0] * len(starts)
    real = collect(session.encoded(policy), policy, starts, members, seed=NOISE_SEED, record=FRAMES)
    session.ledger.record("videos", real, free=True)
    twin = collect(imagination, policy, starts, members, seed=NOISE_SEED)
    session.ledger.record("videos, imagined", twin, free=True)
    return real, twin


def real_beside_imagined(
    session: Session, folder: Path, policy: ChunkPolicy, model: LatentWorldModel, starts: Sequence[Start]
) -> None:
    """Twins, frame by frame at every decision: left the real world, right the imagined one, decoded; same start, same noise."""
    real, twin = twins(session, policy, model.environment(), starts)
    decoder = fitted_decoder(session)
    for row, start in enumerate(starts):
        decoded = decoder.frames(states_of(twin, DECODED)[row])
        count = int((real.mask[row] > 0).sum())
        rows = []
        for name in FRAMES:
            left = real.inputs[name][row].numpy().copy()
            left[count:] = real.final[name][row].numpy()
            rows.append(np.concatenate([left, decoded[name.removeprefix("pixels/")].numpy()], axis=2))
        frames = np.concatenate(rows, axis=1).repeat(3, axis=1).repeat(3, axis=2)
        success, imagined = real.returns()[row], twin.returns()[row]
        title = f"real | imagined - {start.instruction} - start {start.seed} - real {success:.0f}, imagined {imagined:.2f}.mp4"
        write_video(folder / title.replace("|", "beside"), frames, DECISIONS_PER_SECOND)
