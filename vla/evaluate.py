"""Stage 5: base and final policy on test starts that nothing has used, paired, greedy and sampled (`wmrl-eval`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vla.checkpoint import read_policy
from vla.encoded import EncodedEnvironment
from vla.evaluation import compare, episode_records, evaluate, evaluation_starts, summarise, told_the_other_goal
from vla.policy import ChunkPolicy
from vla.session import Session, run_in_session
from wmrl.checkpoint import load_latest
from wmrl.files import read_json, read_json_lines
from wmrl.ledger import Ledger
from wmrl.progress import Progress, note, stage
from wmrl.state_codec import state_hash
from wmrl.types import Start

DECODINGS = {"greedy": True, "sampled": False}
PAIRED_TESTS = {"greedy": "paired_test", "sampled": "paired_test_sampled"}
Records = list[dict[str, Any]]


def run(session: Session) -> None:
    """Evaluate what has not been evaluated yet, compare, write summary.json."""
    config = session.config
    starts = evaluation_starts(config.task, config.evaluate.split, config.evaluate.episodes)
    latest = load_latest(session.run.checkpoints)
    with stage(f"evaluate: {len(starts)} {config.evaluate.split} starts"):
        results: dict[str, Records] = {}
        if config.evaluate.base:
            base = session.base_policy()
            for decoding in DECODINGS:
                results[f"base-{decoding}"] = evaluate_once(session, base, starts, name=f"base-{decoding}")
            results["base-swapped"] = evaluate_swapped(session, base, starts[: config.evaluate.swap_episodes])
        if latest is not None:
            final = read_policy(latest.pretrained, session.device)
            for decoding in DECODINGS:
                results[f"final-{decoding}"] = evaluate_once(session, final, starts, name=f"final-{decoding}")
        summary = summarise_run(session, results)
        session.run.write_summary(summary)
        for line in lines(results, summary):
            note(line)


def lines(results: dict[str, Records], summary: dict[str, Any]) -> list[str]:
    """For people: a line for every evaluation, and one for every paired test."""
    said = []
    for name, records in results.items():
        if records:
            numbers = summarise(records)
            low, high = numbers["interval"]
            said.append(f"{name}: {numbers['success_at_end']:.3f} [{low:.3f}, {high:.3f}], n {numbers['episodes']}")
    for decoding, name in PAIRED_TESTS.items():
        if name in summary:
            test = summary[name]
            low, high = test["interval"]
            rest = f"McNemar p {test['p_value']:.3g}, n {test['n']}"
            said.append(f"final minus base, {decoding}: {test['difference']:+.3f} [{low:+.3f}, {high:+.3f}], {rest}")
    return said


def evaluate_once(session: Session, policy: ChunkPolicy, starts: Sequence[Start], *, name: str) -> Records:
    """Records of one policy and decoding; read from the folder when the same policy was evaluated on the same starts before."""
    return _evaluate(session, session.encoded(policy), policy, starts, name=name)


def evaluate_swapped(session: Session, policy: ChunkPolicy, starts: Sequence[Start]) -> Records:
    """The policy is told the other goal; success, judged by the true one, must fall."""
    if not starts or len(session.task.goals) < 2:
        return []
    world = told_the_other_goal(session.encoded(policy), [text for _, text in session.task.goals])
    return _evaluate(session, world, policy, starts, name="base-swapped")


def _evaluate(
    session: Session, world: EncodedEnvironment, policy: ChunkPolicy, starts: Sequence[Start], *, name: str
) -> Records:
    folder = session.run.evaluation(name)
    weights = state_hash({key: tensor.detach() for key, tensor in policy.state_dict().items()})
    wanted = {"weights": weights, "told": world.told, "episodes": len(starts), "first_start": starts[0].scene_hash}
    if (folder / "summary.json").exists() and read_json(folder / "summary.json").get("evaluated") == wanted:
        return read_json_lines(folder / "episodes.jsonl")
    decoding = name.rsplit("-", 1)[-1]
    with session.ledger.phase("evaluate"), Progress(name, len(starts), unit="episode") as progress:
        rollouts = evaluate(world, policy, starts, greedy=DECODINGS.get(decoding, True), on_wave=progress.update)
    session.ledger.record(f"evaluation {name}", rollouts, free=True)
    records = episode_records(rollouts, policy=name.rsplit("-", 1)[0], decoding=decoding, chunk=session.config.policy.chunk)
    session.run.write_episodes(name, records, {**summarise(records), "evaluated": wanted})
    session.save_ledger()
    return records


def summarise_run(session: Session, results: dict[str, Records]) -> dict[str, Any]:
    """The content of summary.json."""
    config, ledger = session.config, session.ledger
    summary: dict[str, Any] = {"task": config.task, "seed": config.seed, "mode": config.train.correction.mode}
    for policy in ("base", "final"):
        for decoding in DECODINGS:
            if results.get(f"{policy}-{decoding}"):
                name = policy if decoding == "greedy" else f"{policy}_{decoding}"
                summary[name] = summarise(results[f"{policy}-{decoding}"])
    if results.get("base-swapped"):
        swapped = results["base-swapped"]
        summary["base_swapped_instruction"] = summarise(swapped)
        summary["swap_test"] = compare(results["base-greedy"][: len(swapped)], swapped)
    for decoding, name in PAIRED_TESTS.items():
        if results.get(f"base-{decoding}") and results.get(f"final-{decoding}"):
            summary[name] = compare(results[f"base-{decoding}"], results[f"final-{decoding}"])
    metrics = session.run.metrics()
    shares = [record["imagined_share"] for record in metrics if record.get("imagined_share") is not None]
    summary["imagined_share"] = sum(shares) / len(shares) if shares else 0.0
    summary["imagined_success"] = next(
        (r["imagined_success"] for r in reversed(metrics) if r.get("imagined_success") is not None), None
    )
    exam = session.world_model / "exam.json"
    summary["exam"] = read_json(exam) if exam.exists() and config.train.correction.mode != "real" else None
    summary["ledger"] = _spent(ledger)
    return summary


def _spent(ledger: Ledger) -> dict[str, Any]:
    spent = ledger.summary()
    seconds = {phase: entry["wall"] for phase, entry in spent["seconds"].items()}
    counts = {name: spent[name] for name in ("real_decisions", "imagined_decisions", "real_episodes", "imagined_episodes")}
    return {**counts, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
