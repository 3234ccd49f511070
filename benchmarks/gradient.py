"""Is there a policy gradient to follow? Measured before any reinforcement learning, on rollouts of a base policy.

Run `python -m benchmarks.gradient base=runs/demo` (also `starts=64`, `parts=8`, `temperature=1.0`); prints a table and, last,
one JSON line. Rollouts of one start stay in one part, so agreement between parts is agreement on starts never seen.

Shape legend: B rollouts, T decisions, H control steps of a chunk, A action dimensions, M parts, Q numbers that may change.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sim.real import RealEnvironment
from tasks.starts import make_starts
from tasks.task import get_task
from vla.checkpoint import read_policy
from vla.config import PURPOSES, STARTS_PER_SEED, RunConfig
from vla.encoded import EncodedEnvironment
from vla.policy import ChunkPolicy
from wmrl.collect import collect, expand
from wmrl.config import load_resolved
from wmrl.correction.advantages import real_advantages
from wmrl.critic import CrossFittedCritic
from wmrl.types import Rollouts


@dataclass(frozen=True)
class Measured:
    """A mean with its standard error over parts."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} +- {self.error:.4f}"


def agreement(gradients: Tensor) -> Measured:
    """Cosine that the gradients (M, Q) of two parts are expected to have, unbiased in its numerator: mean product of different
    parts over mean squared length; jackknife error. 0 is noise; signal s in noise of deviation d per number has
    |s|^2 / (|s|^2 + Q d^2)."""
    products = (gradients.double() @ gradients.double().T).cpu()

    def ratio(kept: Tensor) -> float:
        chosen = products[kept][:, kept]
        count = len(kept)
        return float((chosen.sum() - chosen.trace()) / (count - 1) / chosen.trace())

    parts = torch.arange(len(gradients))
    left_out = torch.tensor([ratio(parts[parts != part]) for part in parts])
    error = ((len(parts) - 1) / len(parts) * (left_out - left_out.mean()).square().sum()).sqrt()
    return Measured(ratio(parts), float(error))


def held_out_gain(scores: Tensor, advantages: Tensor, part: Tensor) -> Measured:
    """Success gained on held-out parts per unit natural step (half a nat of divergence per rollout; Kakade 2001).

    scores (B, T, Q) gradients of log-probability, zero where no decision was taken; advantages (B, T); part (B,). The direction
    comes from the other parts, the gain from the part itself: without signal it is 0 on average.
    """
    gradients = (scores * advantages[..., None]).sum(1)
    flat = scores.flatten(0, 1)
    fisher = flat.T @ flat / len(scores)
    fisher = fisher + 1e-3 * fisher.diagonal().mean() * torch.eye(len(fisher))
    gains = []
    for held_out in range(int(part.max()) + 1):
        direction = torch.linalg.solve(fisher, gradients[part != held_out].mean(0))
        direction = direction / (direction @ fisher @ direction).sqrt().clamp_min(1e-12)
        gains.append(gradients[part == held_out].mean(0) @ direction)
    table = torch.stack(gains)
    return Measured(float(table.mean()), float(table.std() / len(table) ** 0.5))


def offset_scores(policy: ChunkPolicy, rollouts: Rollouts, per_decision: bool) -> Tensor:
    """(B, T, Q) scores of one offset per action dimension, held over a chunk and the same in every state (Q = A), or one per
    decision too (Q = T A)."""
    shape = (policy.config.chunk, policy.config.action_size)
    with torch.no_grad():
        mean = policy.mean(rollouts.inputs).unflatten(-1, shape)
    scores = (rollouts.actions - mean).sum(-2) * (rollouts.mask > 0)[..., None]
    if not per_decision:
        return scores
    length = scores.shape[1]
    return (torch.eye(length)[None, :, :, None] * scores[:, :, None]).flatten(2)


def measure(policy: ChunkPolicy, rollouts: Rollouts, config: RunConfig, num_parts: int) -> dict[str, Measured]:
    """Agreement of the gradient of everything that is trained, and the gain that a few offsets could bring."""
    critic = CrossFittedCritic(config.train.critic, num_decisions=rollouts.rewards.shape[1])
    judged = critic.judge(rollouts, seed=1)
    advantages = real_advantages(judged, decay=config.train.correction.value_decay).float()
    part = rollouts.folds(num_parts)
    gradients = []
    for number in range(num_parts):
        rows = rollouts[part == number]
        log_probs = policy.log_prob(rows.inputs, rows.actions).sum(-1)
        objective = (log_probs * advantages[part == number]).sum() / len(rows)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(objective, policy.learnable())]))
    return {
        "cosine_of_the_trained_weights": agreement(torch.stack(gradients)),
        "gain_by_an_offset_per_dimension": held_out_gain(offset_scores(policy, rollouts, False), advantages, part),
        "gain_by_an_offset_per_dimension_and_decision": held_out_gain(offset_scores(policy, rollouts, True), advantages, part),
    }


def main() -> None:
    """Keys: base, starts, parts, temperature."""
    given: dict[str, Any] = {"base": "runs/demo", "starts": "64", "parts": "8", "temperature": ""}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in given:
            raise SystemExit(f"expected keys out of {sorted(given)}, got {key!r}")
        given[key] = value
    base, num_starts, num_parts = Path(given["base"]), int(given["starts"]), int(given["parts"])
    if not 3 <= num_parts <= num_starts:
        raise SystemExit(f"expected 3 to {num_starts} parts (a start lies in one part), got {num_parts}")
    config = load_resolved(base / "config.yaml", RunConfig)
    torch.set_num_threads(config.threads)
    policy = read_policy(base / "imitation" / "checkpoints" / "last" / "pretrained_model")
    if given["temperature"]:
        policy.config = replace(policy.config, temperature=float(given["temperature"]))
    task, simulator = get_task(config.task), config.simulator
    first = config.seed * STARTS_PER_SEED + PURPOSES["gradient benchmark"]
    starts = make_starts(task, "train", num_starts, first)
    rows, members = expand(starts, config.train.correction.group_size)
    size = policy.config.encoder.image_size
    with RealEnvironment(
        task, width=simulator.width, num_workers=simulator.workers, chunk=policy.config.chunk, image_size=size
    ) as environment:
        world, recorded = EncodedEnvironment(environment, policy), config.recorded
        rollouts = collect(world, policy, rows, members, seed=5, record=recorded)
    results = measure(policy, rollouts, config, num_parts)
    success = float(rollouts.returns().mean())
    print(f"{len(rollouts)} rollouts of {num_starts} starts, temperature {policy.config.temperature:g}, success {success:.3f}")
    for name, measured in results.items():
        print(f"{name.replace('_', ' '):46s} {measured}")
    values = {name: [measured.value, measured.error] for name, measured in results.items()}
    print(json.dumps({"benchmark": "gradient", "n": len(rollouts), "success": success, **values}))


if __name__ == "__main__":
    main()
