"""How a real and an imagined outcome of the same thing come about: `Replay` executes the predicted decisions, `Twin` shares
the noise.

Shape legend: B rollouts, W rows of one wave, T decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from wmrl.collect import Decider, collect, expand, play_wave
from wmrl.types import Decision, Environment, Observation, Policy, Rollouts, Start, concatenate


class Pairing(Protocol):
    """Executes anchor groups for real, so that each real rollout has an imagined counterpart of the same start and member."""

    same_samples: bool
    """Whether a real rollout and its imagined counterpart are one sample with one score."""

    def execute(
        self,
        environment: Environment,
        policy: Policy,
        starts: Sequence[Start],
        group_size: int,
        imagined: Rollouts | None,
        *,
        seed: int,
        policy_version: int = 0,
        record: Sequence[str] = (),
    ) -> Rollouts:
        """Real rollouts of every start's group; `imagined` (None without a world model) holds the counterparts."""


class Twin:
    """A real closed-loop rollout beside an imagined one of the same start with the same noise (S1 of method 3.9).

    The twins are different samples with different scores; the imagined one is a valid control variate because it has the
    distribution of all imagined rollouts. Replaying the real decisions in the model would not be.
    """

    same_samples = False

    def execute(
        self,
        environment: Environment,
        policy: Policy,
        starts: Sequence[Start],
        group_size: int,
        imagined: Rollouts | None,
        *,
        seed: int,
        policy_version: int = 0,
        record: Sequence[str] = (),
    ) -> Rollouts:
        """Play the policy itself; the noise is keyed by start and member, so passing the imagined rollouts' seed makes
        twins."""
        rows, members = expand(starts, group_size)
        return collect(environment, policy, rows, members, seed=seed, policy_version=policy_version, record=record)


class Replay:
    """The very decisions that were predicted are executed. For one decision this is the control variate; for sequences replayed
    decisions of imagined observations are no longer the policy's own, so use `Twin` there (method 3.9)."""

    same_samples = True

    def execute(
        self,
        environment: Environment,
        policy: Policy,
        starts: Sequence[Start],
        group_size: int,
        imagined: Rollouts | None,
        *,
        seed: int,
        policy_version: int = 0,
        record: Sequence[str] = (),
    ) -> Rollouts:
        rows, members = expand(starts, group_size)
        if imagined is None:
            return collect(environment, policy, rows, members, seed=seed, policy_version=policy_version, record=record)
        keys = {s.group_key for s in starts}
        recorded = imagined[[i for i, s in enumerate(imagined.starts) if s.group_key in keys]]
        return replace(replay(environment, recorded), policy_version=policy_version)


def replay(environment: Environment, recorded: Rollouts) -> Rollouts:
    """Execute recorded decisions in a world: same starts, members, inputs and log-probabilities, the world's own rewards
    and endings."""
    waves = []
    for begin in range(0, len(recorded), environment.width):
        rows = list(range(begin, min(begin + environment.width, len(recorded))))
        padded = recorded[rows + [rows[0]] * (environment.width - len(rows))]
        wave = play_wave(environment, _recorded_decider(padded), list(padded.starts), padded.member.tolist())
        waves.append(wave[: len(rows)])
    return replace(concatenate(waves), inputs=recorded.inputs, final=recorded.final)


def _recorded_decider(recorded: Rollouts) -> Decider:
    def decide(observation: Observation, index: int) -> Decision:
        step = min(index, recorded.actions.shape[1] - 1)
        inputs: dict[str, Tensor] = {name: value[:, step] for name, value in recorded.inputs.items()}
        return Decision(recorded.actions[:, step], recorded.log_probs[:, step], inputs)

    return decide
