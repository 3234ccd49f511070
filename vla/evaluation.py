"""Evaluation that can be believed: frozen test starts, one record per episode, intervals, paired comparison of policies.

Shape legend: B episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.starts import load_manifest
from vla.encoded import EncodedEnvironment
from wmrl.collect import collect
from wmrl.statistics import mcnemar_exact, paired_bootstrap, wilson_interval
from wmrl.types import Environment, Policy, Rollouts, Start, Status

NOISE_SEED = 7_000_003
"""Seed of sampled decoding in evaluations: the same noise for every policy, so that comparisons are paired in it too."""


def evaluation_starts(task: str, split: str, episodes: int) -> list[Start]:
    """The first `episodes` starts of a frozen manifest; never fewer than asked."""
    starts = load_manifest(task, split).starts
    if episodes > len(starts):
        raise ValueError(
            f"expected at most {len(starts)} episodes (the {split} manifest of {task}), got {episodes}; ask for fewer"
        )
    return list(starts[:episodes])


def evaluate(
    environment: Environment,
    policy: Policy,
    starts: Sequence[Start],
    *,
    greedy: bool,
    on_wave: Callable[[int], None] | None = None,
) -> Rollouts:
    """One episode per start; `on_wave` as in `collect`."""
    return collect(environment, policy, starts, [0] * len(starts), seed=NOISE_SEED, greedy=greedy, on_wave=on_wave)


def episode_records(rollouts: Rollouts, *, policy: str, decoding: str, chunk: int) -> list[dict[str, Any]]:
    """One line per episode. The environment ends an episode at its first success, so success at end and once are the same
    here."""
    solved = rollouts.returns() > 0.5
    records = []
    for row, start in enumerate(rollouts.starts):
        success = bool(solved[row]) and int(rollouts.status[row]) == Status.SUCCESS
        decisions = int((rollouts.mask[row] > 0).sum())
        records.append(
            {
                "policy": policy,
                "decoding": decoding,
                "task": start.task,
                "split": start.split,
                "seed": start.seed,
                "start_hash": start.scene_hash,
                "instruction": start.instruction,
                "success_at_end": success,
                "success_once": success,
                "steps_to_success_at_most": decisions * chunk if success else None,
                "decisions": decisions,
                "return": float(rollouts.returns()[row]),
                "status": Status(int(rollouts.status[row])).name.lower(),
                "seconds": float(rollouts.seconds[row]),
            }
        )
    return records


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, rate and Wilson interval of one evaluation."""
    successes = sum(record["success_at_end"] for record in records)
    interval = wilson_interval(successes, len(records))
    by_goal = {}
    for instruction in sorted({record["instruction"] for record in records}):
        chosen = [record["success_at_end"] for record in records if record["instruction"] == instruction]
        by_goal[instruction] = {"success_at_end": sum(chosen) / len(chosen), "episodes": len(chosen)}
    return {
        "success_at_end": interval.estimate,
        "success_once": sum(record["success_once"] for record in records) / len(records),
        "episodes": len(records),
        "interval": [interval.low, interval.high],
        "by_goal": by_goal,
        "statuses": dict(Counter(record["status"] for record in records)),
    }


def compare(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Exact McNemar test and bootstrap interval of (second minus first) on paired starts."""
    if [record["start_hash"] for record in first] != [record["start_hash"] for record in second]:
        raise ValueError(
            "expected two evaluations on the same starts in the same order, got different ones; evaluate both again"
        )
    a = [float(record["success_at_end"]) for record in first]
    b = [float(record["success_at_end"]) for record in second]
    test = mcnemar_exact(a, b)
    difference = paired_bootstrap(b, a, seed=0)
    return {
        "p_value": test.p_value,
        "n": test.n,
        "only_first": test.only_first,
        "only_second": test.only_second,
        "difference": difference.estimate,
        "interval": [difference.low, difference.high],
    }


def told_the_other_goal(environment: EncodedEnvironment, instructions: Sequence[str]) -> EncodedEnvironment:
    """The same world, but the policy reads the next goal's instruction instead of the true one."""
    others = dict(zip(instructions, [*instructions[1:], instructions[0]], strict=True))
    return EncodedEnvironment(environment.environment, environment.policy, told=others)
