"""What an evaluation promises: the episodes asked for, each under its own name, and a headline that is only real."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tasks.starts import load_manifest
from tests.vla.worlds import ConstantPolicy, RuleWorld
from vla.config import RunConfig
from vla.evaluate import lines, summarise_run
from vla.evaluation import compare, episode_records, evaluate, evaluation_starts, summarise
from wmrl.collect import collect
from wmrl.files import write_json
from wmrl.ledger import Ledger
from wmrl.types import Start, Status

TEN = evaluation_starts("lift_cube", "test", 10)


def even_seeds_succeed(start: Start, action: Tensor, decision: int) -> tuple[float, Status]:
    """At the second decision."""
    solved = decision == 1 and start.seed % 2 == 0
    return (1.0, Status.SUCCESS) if solved else (0.0, Status.RUNNING)


def records_of(world: RuleWorld, policy: ConstantPolicy, starts: list[Start]) -> list[dict[str, Any]]:
    return episode_records(evaluate(world, policy, starts, greedy=True), policy="final", decoding="greedy", chunk=8)


@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_ten_episodes_are_the_same_ten_starts_at_any_parallelism(width: int) -> None:
    """Pain report D03."""
    world = RuleWorld(even_seeds_succeed, width=width)
    records = records_of(world, ConstantPolicy(), TEN)
    assert [record["start_hash"] for record in records] == [start.scene_hash for start in TEN]
    assert len({record["start_hash"] for record in records}) == 10
    assert {start.scene_hash for start in world.resets} == {start.scene_hash for start in TEN}
    assert [record["success_at_end"] for record in records] == [start.seed % 2 == 0 for start in TEN]
    assert summarise(records)["success_at_end"] == 0.5 and summarise(records)["episodes"] == 10


def test_more_episodes_than_the_manifest_has_are_refused() -> None:
    count = len(load_manifest("lift_cube", "test").starts)
    whole = evaluation_starts("lift_cube", "test", count)
    assert len({start.scene_hash for start in whole}) == count >= 400 and {start.split for start in whole} == {"test"}
    refusal = rf"expected at most {count} episodes \(the test manifest of lift_cube\), got {count + 1}; ask for fewer"
    with pytest.raises(ValueError, match=refusal):
        evaluation_starts("lift_cube", "test", count + 1)


def test_a_time_limit_with_partial_reward_is_no_success() -> None:
    """Pain report D05."""
    outcomes = [(0.9, Status.TIME_LIMIT), (0.0, Status.FAILURE), (1.0, Status.SUCCESS)]
    world = RuleWorld(lambda start, action, decision: outcomes[TEN.index(start)], width=3)
    records = records_of(world, ConstantPolicy(), TEN[:3])
    assert [record["success_at_end"] for record in records] == [False, False, True]
    assert [record["status"] for record in records] == ["time_limit", "failure", "success"]
    assert summarise(records)["success_at_end"] == pytest.approx(1 / 3)
    assert summarise(records)["statuses"] == {"time_limit": 1, "failure": 1, "success": 1}


def test_records_say_what_was_played() -> None:
    record = records_of(RuleWorld(even_seeds_succeed, width=2), ConstantPolicy(), TEN)[[s.seed % 2 for s in TEN].index(0)]
    start = next(start for start in TEN if start.seed % 2 == 0)
    assert record == {
        "policy": "final",
        "decoding": "greedy",
        "task": "lift_cube",
        "split": "test",
        "seed": start.seed,
        "start_hash": start.scene_hash,
        "instruction": start.instruction,
        "success_at_end": True,
        "success_once": True,
        "steps_to_success_at_most": 16,
        "decisions": 2,
        "return": 1.0,
        "status": "success",
        "seconds": pytest.approx(0.2),
    }


def scored(successes: list[bool]) -> list[dict[str, Any]]:
    """Records that hold what the statistics read."""
    return [
        {"success_at_end": s, "success_once": s, "instruction": "ab"[i % 2], "status": "x", "start_hash": str(i)}
        for i, s in enumerate(successes)
    ]


def test_three_of_ten_on_paper() -> None:
    summary = summarise(scored([True, True, True] + [False] * 7))
    assert summary["success_at_end"] == summary["success_once"] == 0.3
    assert summary["interval"] == pytest.approx([0.1078, 0.6032], abs=1e-4)
    assert summary["by_goal"]["a"] == {"success_at_end": 0.4, "episodes": 5}


def test_paired_comparison_on_paper() -> None:
    base, final = [True] + [False] * 9, [False] + [True] * 6 + [False] * 3
    result = compare(scored(base), scored(final))
    assert (result["only_first"], result["only_second"], result["n"]) == (1, 6, 10)
    assert result["p_value"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert result["difference"] == pytest.approx(0.5)
    assert result["interval"][0] < 0.5 < result["interval"][1]
    with pytest.raises(ValueError, match="the same starts in the same order"):
        compare(scored(base), scored(final)[::-1])


def test_progress_of_an_evaluation_counts_its_episodes() -> None:
    finished: list[int] = []
    evaluate(RuleWorld(even_seeds_succeed, width=4), ConstantPolicy(), TEN, greedy=True, on_wave=finished.append)
    assert finished == [4, 8, 10]


def session_of(folder: Path, metrics: list[dict[str, Any]]) -> Any:
    """What `summarise_run` reads of a session: an empty ledger and these metrics."""
    run = SimpleNamespace(metrics=lambda: metrics)
    return SimpleNamespace(config=RunConfig(), ledger=Ledger(), run=run, world_model=folder)


FOUR = {
    "base-greedy": scored([True] * 4 + [False] * 6),
    "base-sampled": scored([True] * 2 + [False] * 8),
    "final-greedy": scored([True] * 5 + [False] * 5),
    "final-sampled": scored([True] * 8 + [False] * 2),
}


def test_the_summary_keeps_its_contract(tmp_path: Path) -> None:
    write_json(tmp_path / "exam.json", {"verdict": "GREEN"})
    session = session_of(tmp_path, [{"imagined_success": 0.5, "imagined_share": 0.25}])
    with session.ledger.phase("evaluate"):
        pass
    summary = summarise_run(session, FOUR)
    assert {"task", "seed", "base", "final", "paired_test", "imagined_success", "imagined_share", "exam", "ledger"} | {
        "mode",
        "base_sampled",
        "final_sampled",
        "paired_test_sampled",
    } == summary.keys()
    assert (summary["task"], summary["seed"], summary["exam"]) == ("lift_cube", 0, {"verdict": "GREEN"})
    assert (summary["imagined_success"], summary["imagined_share"]) == (0.5, 0.25)
    for policy, rate in (("base", 0.4), ("final", 0.5), ("base_sampled", 0.2), ("final_sampled", 0.8)):
        assert {"success_at_end", "success_once", "episodes", "interval"} <= summary[policy].keys()
        assert summary[policy]["success_at_end"] == rate and summary[policy]["episodes"] == 10
    for test, p_value in (("paired_test", 1.0), ("paired_test_sampled", 2 / 2**6)):
        assert {"p_value", "n", "difference", "interval"} <= summary[test].keys()
        assert summary[test]["p_value"] == pytest.approx(p_value) and summary[test]["n"] == 10
    ledger = summary["ledger"]
    assert {"real_decisions", "imagined_decisions", "real_episodes", "seconds"} <= ledger.keys()
    assert ledger["real_episodes"] == 0 and list(ledger["seconds"]) == ["evaluate"]


def test_the_reader_is_told_each_decoding_apart(tmp_path: Path) -> None:
    said = lines(FOUR, summarise_run(session_of(tmp_path, []), FOUR))
    assert [line.split(":")[0] for line in said] == [*FOUR, "final minus base, greedy", "final minus base, sampled"]
    assert said[0] == "base-greedy: 0.400 [0.168, 0.687], n 10"
    assert re.fullmatch(r"final minus base, greedy: \+0.100 \[\+0.000, \+0.300\], McNemar p 1, n 10", said[4])
    assert re.fullmatch(r"final minus base, sampled: \+0.600 \[\+0.300, \+0.900\], McNemar p 0.0312, n 10", said[5])


def bold_actions_succeed(start: Start, action: Tensor, decision: int) -> tuple[float, Status]:
    return (1.0, Status.SUCCESS) if action[0] > 0.9 else (0.0, Status.RUNNING)


def test_a_world_model_that_calls_everything_a_success_does_not_touch_the_headline(tmp_path: Path) -> None:
    """Pain report D12: the real number is the headline, the imagined one stands apart."""
    policy = ConstantPolicy(0.95)
    imagined = collect(RuleWorld(bold_actions_succeed, width=4, imagined=True), policy, TEN, [0] * 10, seed=0)
    assert imagined.returns().mean() == 1.0
    real = records_of(RuleWorld(lambda start, action, decision: (0.0, Status.RUNNING), width=4), policy, TEN)
    session = session_of(tmp_path, [{"step": 0, "imagined_success": 1.0, "imagined_share": 0.8, "real_success": 0.0}])
    summary = summarise_run(session, {"base-greedy": real, "final-greedy": real})
    assert summary["final"]["success_at_end"] == 0.0 and summary["final"]["statuses"] == {"time_limit": 10}
    assert summary["imagined_success"] == 1.0 and summary["imagined_share"] == 0.8
    assert summary["paired_test"]["p_value"] == 1.0 and summary["paired_test"]["difference"] == 0.0
