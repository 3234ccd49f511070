"""Playing a policy in a world, real or imagined: `collect` turns starts into rollouts.

Shape legend: B rollouts, W rows of one wave (the width of the environment), T decisions, K tokens of one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from wmrl.noise import uniforms
from wmrl.types import Decision, Environment, Observation, Policy, Rollouts, Start, Status, Step, concatenate

Decider = Callable[[Observation, int], Decision]
"""(observation, decision index) -> decision: how one wave is driven."""


def expand(starts: Sequence[Start], group_size: int) -> tuple[list[Start], list[int]]:
    """Every start `group_size` times, with the member numbers 0 .. group_size - 1."""
    return [s for s in starts for _ in range(group_size)], [m for _ in starts for m in range(group_size)]


def collect(
    environment: Environment,
    policy: Policy,
    starts: Sequence[Start],
    members: Sequence[int],
    *,
    seed: int,
    greedy: bool = False,
    policy_version: int = 0,
    model_version: int = 0,
    record: Sequence[str] = (),
    on_wave: Callable[[int], None] | None = None,
) -> Rollouts:
    """Play one rollout per (start, member), in waves of `environment.width`, in the caller's order.

    The last wave is filled up by repeating its first start, so that batch shapes never change; the extra rows are dropped.
    Observation entries named in `record` are stored in `inputs` beside what the policy itself asked to keep.
    `on_wave` is told after each wave how many rollouts are finished (progress bars).
    Rewards that are not finite never pass: the rollout counts as INFRASTRUCTURE (real) or CENSORED (imagined), all its
    rewards 0.
    """
    if not starts or len(starts) != len(members):
        raise ValueError(f"expected at least one start and a member for each, got {len(starts)} starts, {len(members)} members")
    waves = []
    for begin in range(0, len(starts), environment.width):
        rows = list(range(begin, min(begin + environment.width, len(starts))))
        padded = rows + [rows[0]] * (environment.width - len(rows))
        wave_starts, wave_members = [starts[i] for i in padded], [int(members[i]) for i in padded]
        noise = None if greedy else _Noise(seed, wave_starts[: len(rows)], wave_members[: len(rows)], policy.noise_size)
        decide = _policy_decider(policy, noise, environment.width)
        wave = play_wave(environment, decide, wave_starts, wave_members, record=record)
        waves.append(wave[: len(rows)])
        if on_wave is not None:
            on_wave(rows[-1] + 1)
    return replace(concatenate(waves), policy_version=policy_version, model_version=model_version)


@dataclass(frozen=True)
class _Noise:
    """Names the noise of a wave: what `uniforms` needs beside the decision's number."""

    seed: int
    starts: Sequence[Start]
    members: Sequence[int]
    size: int

    def __call__(self, decision: int, width: int) -> Tensor:
        """(W, noise_size), the filled-up rows sharing the first row's numbers."""
        drawn = uniforms(self.seed, self.starts, self.members, decision, self.size)
        return torch.cat([drawn, drawn[:1].expand(width - len(drawn), -1)])


def _policy_decider(policy: Policy, noise: _Noise | None, width: int) -> Decider:
    def decide(observation: Observation, index: int) -> Decision:
        with torch.no_grad():
            return policy.act(observation, None if noise is None else noise(index, width))

    return decide


@dataclass
class _Tape:
    """What a wave leaves behind, one entry per decision, and one more of `inputs`: those after the last decision."""

    decisions: list[Decision] = field(default_factory=list)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    mask: list[Tensor] = field(default_factory=list)


def play_wave(
    environment: Environment, decide: Decider, starts: Sequence[Start], members: Sequence[int], *, record: Sequence[str] = ()
) -> Rollouts:
    """One wave of exactly `environment.width` rows, driven by `decide`; stops early when every row has ended."""
    width = len(starts)
    observation = environment.reset(starts)
    alive, seconds = torch.ones(width), torch.zeros(width)
    status = torch.full((width,), int(Status.RUNNING))
    broken = torch.zeros(width, dtype=torch.bool)
    tape, variance = _Tape(), None
    for index in range(environment.max_decisions):
        decision = decide(observation, index)
        step = environment.step(decision.actions)
        tape.decisions.append(decision)
        tape.inputs.append(_keep(decision.inputs, observation, record))
        tape.mask.append(alive)
        finite, alive_after = _checked_survival(step, alive)
        broken |= ~finite & (alive > 0)
        tape.rewards.append(torch.where(finite & (alive > 0), step.reward.float(), 0.0))
        alive = torch.where(broken, 0.0, alive_after)
        status, seconds = step.status.long(), seconds + step.seconds
        observation, variance = step.observation, step.variance
        if not bool((alive > 0).any()):
            break
    status = torch.where(status == Status.RUNNING, int(Status.TIME_LIMIT), status)
    status = torch.where(broken, int(Status.CENSORED if environment.imagined else Status.INFRASTRUCTURE), status)
    tape.inputs.append(_keep(decide(observation, len(tape.decisions)).inputs, observation, record))
    rollouts = _to_rollouts(tape, starts, members, environment, status=status)
    return replace(rollouts, seconds=seconds, variance=variance)


def _checked_survival(step: Step, before: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows reported finite numbers, and the survival (W,) after the step, which can only fall.

    `Step.alive` and `Step.reward` are unconditional: the probability of being alive after all decisions so far, and the
    reward times the probability of having got there. An environment that reports hazards of this step alone is caught here,
    mostly.
    """
    finite = torch.isfinite(step.reward) & torch.isfinite(step.alive)
    after = torch.where(finite, step.alive.float(), 0.0)
    if bool((after > before + 1e-5).any()):
        raise ValueError(
            "expected Step.alive to be the probability of running after all decisions so far, which never rises; "
            f"got {float((after - before).max()):.3g} more than before: multiply the conditional survival up in the environment"
        )
    return finite, after


def _keep(inputs: dict[str, Tensor], observation: Observation, record: Sequence[str]) -> dict[str, Tensor]:
    missing = [name for name in record if name not in observation]
    if missing:
        raise ValueError(f"expected observations with {missing} (asked for by `record`), got {sorted(observation)}")
    return {**inputs, **{name: torch.as_tensor(observation[name]).clone() for name in record}}


def _to_rollouts(
    tape: _Tape,
    starts: Sequence[Start],
    members: Sequence[int],
    environment: Environment,
    *,
    status: Tensor,
) -> Rollouts:
    """Stack the tape to (W, T, ...), padded up to `max_decisions` so that all waves have one shape.

    What the policy said in rows that had ended is blanked, so that nothing depends on who shared the wave.
    """
    mask = _stack(tape.mask, environment.max_decisions)
    taken = mask > 0
    log_probs = _stack([d.log_probs for d in tape.decisions], environment.max_decisions)
    usable = (status != Status.CENSORED) & (status != Status.INFRASTRUCTURE)
    rewards = _stack(tape.rewards, environment.max_decisions) * usable[:, None]
    count = taken.sum(dim=1)
    rows = torch.arange(len(starts))
    series = {name: torch.stack([entry[name] for entry in tape.inputs], dim=1) for name in tape.inputs[0]}
    return Rollouts(
        starts=tuple(starts),
        member=torch.tensor(list(members), dtype=torch.long),
        actions=_blank(_stack([d.actions for d in tape.decisions], environment.max_decisions), taken),
        inputs={name: _blank(_pad(values[:, :-1], environment.max_decisions), taken) for name, values in series.items()},
        final={name: values[rows, count] for name, values in series.items()},
        log_probs=_blank(log_probs, taken),
        token_mask=torch.ones_like(log_probs, dtype=torch.bool),
        rewards=rewards,
        mask=mask,
        status=status,
        seconds=torch.zeros(len(starts)),
        imagined=environment.imagined,
    )


def _blank(values: Tensor, taken: Tensor) -> Tensor:
    """Values (W, T, ...) with 0 where no decision was taken (W, T)."""
    return torch.where(taken.reshape(*taken.shape, *([1] * (values.dim() - 2))), values, values.new_zeros(()))


def _stack(items: Sequence[Tensor], length: int) -> Tensor:
    return _pad(torch.stack(list(items), dim=1), length)


def _pad(stacked: Tensor, length: int) -> Tensor:
    missing = length - stacked.shape[1]
    if missing == 0:
        return stacked
    return torch.cat([stacked, stacked.new_zeros((stacked.shape[0], missing, *stacked.shape[2:]))], dim=1)
