"""The trainer: one step mixes imagined and real rollouts into one policy update, whatever the domain, the simulator or the
model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from wmrl.buffer import Buffer
from wmrl.collect import collect, expand
from wmrl.correction import Anchors, Correction, Plan
from wmrl.correction.correction import StartSource
from wmrl.correction.settings import KeyframeSource
from wmrl.critic import CrossFittedCritic
from wmrl.keyframes import branches
from wmrl.ledger import Ledger
from wmrl.noise import derive_seed
from wmrl.objective import Objective, ObjectiveConfig, TrainablePolicy
from wmrl.pairing import Pairing
from wmrl.proposal import Proposal, frozen_copy
from wmrl.types import Environment, ImaginedWorld, Rollouts, Start, Status


class StatefulWorld(ImaginedWorld, Protocol):
    """An imagined world that can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class TrainerConfig:
    """seed of everything random; refresh_every steps the world model is fitted again (0: never); record names observation
    entries that real rollouts keep beside the policy's inputs (what the critic or the world model learns from)."""

    seed: int = 0
    refresh_every: int = 4
    record: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.refresh_every < 0:
            raise ValueError(f"expected trainer.refresh_every of at least 0, got {self.refresh_every}")


@dataclass
class Parts:
    """The collaborators of a trainer. `imagination` may be None in mode real; with `keyframes` it begins at states of the
    buffer's real rollouts, else where the real groups begin."""

    environment: Environment
    imagination: StatefulWorld | None
    policy: TrainablePolicy
    pairing: Pairing
    correction: Correction
    starts: StartSource
    buffer: Buffer
    ledger: Ledger
    critic: CrossFittedCritic | None = None
    keyframes: KeyframeSource | None = None


class Trainer:
    """Runs steps. Every random number is keyed by (seed, step, purpose), so a step depends on the state before it and
    nothing else."""

    def __init__(
        self,
        config: TrainerConfig,
        parts: Parts,
        objective: ObjectiveConfig,
        *,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if parts.correction.uses_model and parts.imagination is None:
            mode = parts.correction.config.mode
            raise ValueError(f"expected a world model with correction.mode={mode}, got none: fit one first, or use mode=real")
        self.config, self.parts = config, parts
        self._reference = frozen_copy(parts.policy)
        self._objective = Objective(objective, parts.policy, self._reference)
        proposes = parts.keyframes is not None and parts.correction.uses_model
        self._proposal = Proposal(parts.policy, self._objective) if proposes else None
        self._on_step = on_step
        self.step_index = 0

    def step(self) -> dict[str, Any]:
        """One training step; returns its record for the log: kappa, l and dose as used, trust and its measures as they are
        now."""
        parts, correction, ledger = self.parts, self.parts.correction, self.parts.ledger
        before = ledger.wall_seconds()
        plan = correction.plan(parts.starts, self.step_index, self.config.seed, parts.keyframes)
        extra = self._extra_updates(plan)
        with ledger.phase("imagine"):
            twins = self._imagine(plan.starts, "rollouts")
            anchors = correction.choose_anchors(plan, twins)  # after the predictions, before any real outcome
        with ledger.phase("real"):
            real = parts.pairing.execute(
                parts.environment,
                parts.policy,
                anchors.starts,
                correction.config.group_size,
                twins,
                seed=self._seed("rollouts"),
                policy_version=self.step_index,
                record=self.config.record,
            )
            ledger.record("anchors", real)
        with ledger.phase("update"):
            real = self._judged(real)
            batch = correction.correct(plan, anchors, twins, real, same_samples=parts.pairing.same_samples)
            numbers = self._objective.update(batch.sources, seed=self._seed("minibatches"), pace=batch.pace)
            if self._proposal is not None and plan.extra:
                correction.judge_updates(real, self._proposal.change(real))
            correction.update(twins, real)  # only now may these outcomes move the state
        parts.buffer.add(replace(real, values=None))
        with ledger.phase("fit"):
            losses = self._refresh()
        record = {
            "step": self.step_index,
            **_outcomes(real, twins),
            **batch.info,
            **numbers,
            **extra,
            "imagined_share": _imagined_share(batch.info, extra, decisions=_decisions(real) if plan.at_keyframes else 1.0),
            **correction.metrics(),
            **losses,
            "optimizer_updates_total": self._objective.num_updates,
            "skipped_updates_total": self._objective.skipped,
            "model_version": parts.imagination.version if parts.imagination else 0,
            **self._spent(before),
        }
        self.step_index += 1
        if self._on_step:
            self._on_step(record)
        return record

    def warm_start(self, real: Rollouts) -> dict[str, float]:
        """One real update from groups that the policy, still as it was when training began, has just played; they go to the
        buffer.

        The base rollouts that the first world model learns from are real experience of the current policy: every mode uses
        them, at full pace, and before the exam's evidence, which these very outcomes gave.
        """
        assert self.step_index == 0, "a warm start comes before the first step"
        starts = tuple({start.group_key: start for start in real.starts}.values())
        plan, anchors = Plan(-1, self.config.seed, starts, ()), Anchors(starts, (1.0,) * len(starts))
        with self.parts.ledger.phase("update"):
            real = self._judged(real)
            batch = self.parts.correction.correct(plan, anchors, None, real, same_samples=False)
            numbers = self._objective.update(batch.sources, seed=self._seed("warm start"), pace=batch.pace)
            self.parts.correction.update(None, real)
        self.parts.buffer.add(replace(real, values=None))
        return numbers

    def _judged(self, real: Rollouts) -> Rollouts:
        """Real rollouts with the critic's values, where there is a critic."""
        return real if self.parts.critic is None else self.parts.critic.judge(real, seed=self._seed("critic"))

    def _seed(self, *purpose: int | str) -> int:
        return derive_seed(self.config.seed, self.step_index, *purpose)

    def _imagine(self, starts: Sequence[Start], *purpose: int | str) -> Rollouts | None:
        """Imagined groups of these starts under the current policy, None without starts and in mode real."""
        model = self.parts.imagination
        if model is None or not starts or not self.parts.correction.uses_model:
            return None
        rows, members = expand(starts, self.parts.correction.config.group_size)
        rollouts = collect(
            model.environment(),
            self.parts.policy,
            rows,
            members,
            seed=self._seed(*purpose),
            policy_version=self.step_index,
            model_version=model.version,
        )
        self.parts.ledger.record("imagination", rollouts)
        return rollouts

    def _branch(self, keyframes: Sequence[Start], *purpose: int | str) -> Rollouts | None:
        """Imagined branches of recorded states, one decision each; None where none are planned."""
        rollouts = self._imagine(keyframes, *purpose)
        return None if rollouts is None else branches(rollouts)

    def _extra_updates(self, plan: Plan) -> dict[str, float]:
        """The dose: updates on imagined rollouts alone, each from its own starts and the newest policy, before anything is
        executed. With keyframes they are a proposal that this step's real rollouts will judge; where nothing is trusted yet,
        one that is taken back."""
        kept, imagine = self.parts.correction.dose() > 0, self._branch if plan.at_keyframes else self._imagine
        totals: dict[str, float] = {"dose": float(len(plan.extra)) if kept else 0.0}
        if self._proposal is not None:
            self._proposal.begin(kept=kept)
        for number, starts in enumerate(plan.extra):
            with self.parts.ledger.phase("imagine"):
                imagined = imagine(starts, "extra", number)
                assert imagined is not None, "a dose without a world model"
            with self.parts.ledger.phase("update"):
                batch = self.parts.correction.imagined_batch(imagined)
                numbers = self._objective.update(batch.sources, seed=self._seed("extra minibatches", number), extra=True)
            totals["extra_imagined_success"] = float(imagined.returns().mean())
            if kept:
                for name in ("kl", "optimizer_updates", "clipped_tokens_imagined"):
                    totals[f"extra_{name}"] = totals.get(f"extra_{name}", 0.0) + numbers.get(name, 0.0)
                totals["extra_mass_imagined"] = totals.get("extra_mass_imagined", 0.0) + batch.info["mass_imagined"]
        if self._proposal is not None:
            self._proposal.end()
        return totals

    def _refresh(self) -> dict[str, float]:
        """Fit the world model again on everything real, every few steps; its pairs were used for the correction before."""
        model, every = self.parts.imagination, self.config.refresh_every
        if model is None or not self.parts.correction.uses_model or every == 0 or (self.step_index + 1) % every:
            return {}
        losses = model.fit(self.parts.buffer.all(), seed=self._seed("fit"))
        self.parts.correction.model_refreshed()
        return {f"model_{name}": value for name, value in losses.items()}

    def _spent(self, before: dict[str, float]) -> dict[str, Any]:
        ledger = self.parts.ledger
        return {
            "seconds": {name: total - before.get(name, 0.0) for name, total in ledger.wall_seconds().items()},
            "real_decisions": ledger.real_decisions,
            "imagined_decisions": ledger.imagined_decisions,
            "real_episodes": ledger.real_episodes,
            "imagined_episodes": ledger.imagined_episodes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything a step depends on, as nested dictionaries of tensors and plain values."""
        parts = self.parts
        return {
            "step_index": self.step_index,
            "policy": dict(parts.policy.state_dict()),
            "reference": {n: p.detach() for n, p in self._reference.named_parameters() if n in _trained(parts.policy)},
            "objective": self._objective.state_dict(),
            "correction": parts.correction.state_dict(),
            "imagination": parts.imagination.state_dict() if parts.imagination else None,
            "buffer": parts.buffer.state_dict(),
            "ledger": parts.ledger.state_dict(),
            "critic": parts.critic.state_dict() if parts.critic else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        parts = self.parts
        self.step_index = state["step_index"]
        parts.policy.load_state_dict(state["policy"])
        saved = state["reference"]
        with torch.no_grad():
            for name, parameter in self._reference.named_parameters():
                if name in saved:
                    parameter.copy_(saved[name])
        self._objective.load_state_dict(state["objective"])
        parts.correction.load_state_dict(state["correction"])
        if parts.imagination is not None:
            parts.imagination.load_state_dict(state["imagination"])
        parts.buffer.load_state_dict(state["buffer"])
        parts.ledger.load_state_dict(state["ledger"])
        if parts.critic is not None:
            parts.critic.load_state_dict(state["critic"])


def _trained(policy: TrainablePolicy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _imagined_share(info: dict[str, float], extra: dict[str, float], *, decisions: float) -> float:
    """Share of the step's |coefficient| mass on imagined rollouts, each extra update counted in full; 0 when there is no mass
    at all. It says what the updates were made of, not how far each moved the policy. `decisions`: of a real rollout, for each
    of which a branch of one decision stands."""
    imagined = info.get("mass_imagined", 0.0) + decisions * extra.get("extra_mass_imagined", 0.0)
    total = imagined + info["mass_real"]
    return imagined / total if total > 0 else 0.0


def _decisions(rollouts: Rollouts) -> float:
    return float(rollouts.mask.sum()) / len(rollouts)


def _outcomes(real: Rollouts, imagined: Rollouts | None) -> dict[str, float]:
    """The real success rate under its own name, never mixed with the imagined one."""
    valid = real.valid()
    successes = (real.status == Status.SUCCESS) & valid
    numbers = {
        "real_success": float(successes.sum()) / max(int(valid.sum()), 1),
        "real_return": float(real.returns()[valid].mean()) if bool(valid.any()) else 0.0,
        "real_rollouts": float(len(real)),
        "real_without_outcome": float((~valid).sum()),
    }
    if imagined is not None:
        usable = imagined.valid()
        numbers["imagined_success"] = float(imagined.returns()[usable].mean()) if bool(usable.any()) else 0.0
        numbers["imagined_without_outcome"] = float((~usable).sum())
    return numbers
