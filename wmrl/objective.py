"""The policy update: a clipped policy gradient on coefficients that were formed before any clipping, with a leash to a
reference policy.

Shape legend: B rollouts, T decisions, K tokens; D decisions that carry a coefficient (rows of the update).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wmrl.correction import Weighted
from wmrl.types import Policy

_ROWS_AT_ONCE = 512
"""Decisions per call of the reference policy: enough to be fast, little enough to bound the memory."""


class TrainablePolicy(Policy, Protocol):
    """A policy that is a `torch.nn.Module`; parameters without `requires_grad` (a frozen encoder) are left alone."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class ObjectiveConfig:
    """clip_low and clip_high bound the ratio to [1 - low, 1 + high]; kl is the weight of the mean k3 divergence per token.

    epochs and minibatches (per epoch) are those of the corrected update, the imagined ones, and imagined_learning_rate (None:
    the same), those of each extra imagined update, of which there are many, less noisy and each from fresh rollouts. Their
    number is fixed, not their size: Adam moves about as far per minibatch whatever is in it, so a mode with more rollouts per
    step must not take more of them.
    """

    learning_rate: float = 5e-4
    imagined_learning_rate: float | None = None
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl: float = 0.02
    epochs: int = 4
    imagined_epochs: int = 2
    minibatches: int = 2
    imagined_minibatches: int = 4
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        positive = "learning_rate epochs imagined_epochs minibatches imagined_minibatches max_gradient_norm".split()
        if self.imagined_learning_rate is not None:
            positive.append("imagined_learning_rate")
        bad = [name for name in positive if getattr(self, name) <= 0]
        if bad:
            raise ValueError(f"expected objective.{bad[0]} above 0, got {getattr(self, bad[0])}")
        if not 0 < self.clip_low < 1 or self.clip_high <= 0 or self.kl < 0:
            raise ValueError(
                "expected objective.clip_low in (0, 1), clip_high above 0 and kl at least 0, "
                f"got {self.clip_low}, {self.clip_high} and {self.kl}"
            )


@dataclass(frozen=True)
class _Rows:
    """Decisions of all sources in one table: inputs name -> (D, ...), actions (D, ...), old and reference log_probs (D, K)."""

    inputs: dict[str, Tensor]
    actions: Tensor
    log_probs: Tensor
    reference: Tensor | None
    token_mask: Tensor
    coefficients: Tensor
    imagined: Tensor


class Objective:
    """Maximises sum_i sum_t c_it sum_k min-clipped ratio_itk / (T K) - kl * mean k3(reference, policy).

    The divisor T K is a constant, never the valid length (a length-normalised loss re-weights rollouts, method 3.9). With
    ratio 1 the gradient is exactly sum c_it grad log pi / (T K).
    """

    def __init__(self, config: ObjectiveConfig, policy: TrainablePolicy, reference: Policy | None = None) -> None:
        self.config = config
        self._policy = policy
        self._reference = reference
        self._parameters = [p for _, p in policy.named_parameters() if p.requires_grad]
        # Two sets of moments: imagined gradients are far less noisy than real ones, and an update that imagination proposes
        # must not carry the momentum of real outcomes, since real outcomes are to judge it.
        self._optimizers = {name: torch.optim.Adam(self._parameters) for name in ("corrected", "extra")}
        self.num_updates = 0
        self.skipped = 0

    def update(self, sources: Sequence[Weighted], *, seed: int, extra: bool = False, pace: float = 1.0) -> dict[str, float]:
        """Several epochs of minibatches over all decisions with a coefficient; without any, nothing happens and it is
        counted. `pace` scales the rate: Adam forgets how large a gradient is, so a smaller share of a step must go slower."""
        rows = self._rows(sources) if pace > 0 else None
        if rows is None:
            self.skipped += 1
            return {"optimizer_updates": 0.0, "skipped_updates": 1.0}
        count, (length, tokens) = len(rows.coefficients), sources[0].rollouts.log_probs.shape[1:]
        config = self.config
        epochs = config.imagined_epochs if extra else config.epochs
        generator = torch.Generator().manual_seed(seed % 2**63)
        optimizer = self._optimizers["extra" if extra else "corrected"]
        for group in optimizer.param_groups:
            group["lr"] = pace * ((config.imagined_learning_rate if extra else None) or config.learning_rate)
        parts = min(count, config.imagined_minibatches if extra else config.minibatches)
        totals: dict[str, float] = {}
        for epoch in range(epochs):
            for part, index in enumerate(torch.randperm(count, generator=generator).tensor_split(parts)):
                numbers = self._minibatch(rows, index, optimizer, scale=parts / (length * tokens), first=epoch == part == 0)
                totals = {name: totals.get(name, 0.0) + value for name, value in numbers.items()}
        return _summary(totals, updates=epochs * parts)

    def _minibatch(
        self, rows: _Rows, index: Tensor, optimizer: torch.optim.Optimizer, *, scale: float, first: bool
    ) -> dict[str, float]:
        current = self._policy.log_prob({n: v[index] for n, v in rows.inputs.items()}, rows.actions[index])
        mask = rows.token_mask[index]
        difference = torch.where(mask, current - rows.log_probs[index], 0.0)
        if first:
            assert_on_policy(difference)
        loss, clipped = clipped_loss(difference, rows.coefficients[index], mask, self.config.clip_low, self.config.clip_high)
        loss = loss * scale
        divergence = torch.zeros(())
        if rows.reference is not None:
            divergence = k3_divergence(current, rows.reference[index], mask)
            loss = loss + self.config.kl * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_gradient_norm))
        if not math.isfinite(norm):
            raise FloatingPointError("expected a finite policy gradient, got nan or inf: check the policy's inputs")
        optimizer.step()
        self.num_updates += 1
        imagined = rows.imagined[index][:, None] & mask
        return {
            "gradient_norm": norm,
            "kl": float(divergence.detach()),
            "ratio_change": float(difference.detach().abs().sum() / mask.sum().clamp(min=1)),
            "clipped_real": float((clipped & ~imagined & mask).sum()),
            "clipped_imagined": float((clipped & imagined).sum()),
            "tokens_real": float((mask & ~imagined).sum()),
            "tokens_imagined": float(imagined.sum()),
        }

    def _rows(self, sources: Sequence[Weighted]) -> _Rows | None:
        """Select the decisions whose coefficient is not 0; the others would change nothing but the divergence and the time."""
        chosen = [(s.rollouts, (s.coefficients != 0) & (s.rollouts.mask > 0)) for s in sources]
        if not any(bool(keep.any()) for _, keep in chosen):
            return None
        names = set.intersection(*(set(r.inputs) for r, _ in chosen))
        inputs = {n: torch.cat([r.inputs[n][keep] for r, keep in chosen]) for n in sorted(names)}
        actions = torch.cat([r.actions[keep] for r, keep in chosen])
        return _Rows(
            inputs=inputs,
            actions=actions,
            log_probs=torch.cat([r.log_probs[keep] for r, keep in chosen]),
            reference=self._reference_log_probs(inputs, actions),
            token_mask=torch.cat([r.token_mask[keep] for r, keep in chosen]),
            coefficients=torch.cat([s.coefficients[keep] for s, (_, keep) in zip(sources, chosen, strict=True)]).float(),
            imagined=torch.cat([torch.full((int(keep.sum()),), r.imagined) for r, keep in chosen]),
        )

    def _reference_log_probs(self, inputs: dict[str, Tensor], actions: Tensor) -> Tensor | None:
        if self._reference is None or self.config.kl == 0:
            return None
        with torch.no_grad():
            blocks = torch.arange(len(actions)).split(_ROWS_AT_ONCE)
            parts = [self._reference.log_prob({n: v[b] for n, v in inputs.items()}, actions[b]) for b in blocks]
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """Optimiser moments by parameter number, and the counters."""
        states = {name: optimizer.state_dict()["state"] for name, optimizer in self._optimizers.items()}
        return {
            "optimizers": {name: {str(key): dict(entry) for key, entry in state.items()} for name, state in states.items()},
            "num_updates": self.num_updates,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self._optimizers.items():
            groups = optimizer.state_dict()["param_groups"]
            moments = {int(key): dict(entry) for key, entry in state["optimizers"][name].items()}
            optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.num_updates, self.skipped = state["num_updates"], state["skipped"]


def assert_on_policy(difference: Tensor, tolerance: float = 1e-2) -> None:
    """Before the first update the ratio is 1: the log-probability at collection and at training are one function of one
    input."""
    worst = float(difference.detach().abs().max())
    if worst > tolerance:
        raise AssertionError(
            f"expected equal log-probabilities at collection and before the first update, got a difference of {worst:.3g}: "
            "the policy changed between, depends on the batch, or was given other inputs"
        )


def clipped_loss(difference: Tensor, coefficients: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """- sum_t c_t sum_k min(ratio c, clip(ratio) c) and which tokens are clipped (D, K) (Schulman et al. 2017, eq. 7;
    two-sided clip).

    difference (D, K): log-probability now minus at collection. coefficients (D,) are weights and signs at once.
    """
    ratio = difference.clamp(-20.0, 20.0).exp()
    weight = coefficients[:, None]
    plain, bounded = ratio * weight, ratio.clamp(1 - low, 1 + high) * weight
    surrogate = torch.where(mask, torch.minimum(plain, bounded), 0.0)
    return -surrogate.sum(), (bounded < plain).detach()


def k3_divergence(current: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of exp(d) - 1 - d, d = log reference - log current (Schulman 2020, estimator k3), with d capped
    against overflow."""
    gap = torch.where(mask, reference - current, 0.0).clamp(-20.0, 5.0)
    return ((gap.exp() - 1 - gap) * mask).sum() / mask.sum().clamp(min=1)


def _summary(totals: dict[str, float], *, updates: int) -> dict[str, float]:
    tokens = {kind: totals.pop(f"tokens_{kind}") for kind in ("real", "imagined")}
    clipped = {kind: totals.pop(f"clipped_{kind}") for kind in ("real", "imagined")}
    rates = {f"clip_rate_{kind}": clipped[kind] / max(tokens[kind], 1.0) for kind in tokens}
    return {
        **{name: value / updates for name, value in totals.items()},
        **{f"clipped_tokens_{kind}": clipped[kind] for kind in clipped},
        **rates,
        "optimizer_updates": float(updates),
        "skipped_updates": 0.0,
    }
