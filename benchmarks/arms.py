"""The main comparison: real-only RL, the uncorrected world model and WMRL from one base policy, at equal real decisions.

For every training seed one base run (demonstrations, imitation, base rollouts, world model) and, from it, one run per arm;
then paired differences over seeds and test starts. Finished parts are kept, so a killed benchmark continues; with other
settings it is refused. Run
`python -m benchmarks.arms seeds=0,1,2 episodes=400`; prints a table and, last, one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from wmrl.files import read_json, read_json_lines
from wmrl.statistics import Interval, hierarchical_bootstrap, wilson_interval

ARMS: dict[str, list[str]] = {
    # fitting the world model costs 32 perturbed demonstrations and the looking ahead of the expert in them: about as many real
    # decisions as two steps, which real-only gets on top
    "real": ["train.correction.mode=real", "train.steps=14"],
    "uncorrected": [
        *("train.correction.mode=model", "train.correction.debias=false", "train.correction.denoise=false"),
        "train.correction.dose=16",  # the most that trust could give
    ],
    "wmrl": ["train.correction.mode=auto"],
    "wmrl-open": ["train.correction.mode=auto", "train.correction.gate=open"],
}


def run_stage(module: str, arguments: list[str], log: Path) -> None:
    """One stage in a process of its own, output appended to the log."""
    with log.open("a") as file:
        done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed with status {done.returncode}: see {log}")


def prepare_base(folder: Path, seed: int, episodes: int, extra: list[str]) -> Path:
    """The base run of a seed, up to and including the first world model, and the evaluation of its policy."""
    name = f"seed{seed}-base"
    arguments = [f"runs={folder}", f"name={name}", f"seed={seed}", f"evaluate.episodes={episodes}", *extra]
    folder.mkdir(parents=True, exist_ok=True)
    for module in ("vla.collect", "vla.sft", "vla.world_model", "vla.evaluate"):
        run_stage(module, arguments, folder / f"{name}.log")
    return folder / name


def run_arm(folder: Path, arm: str, seed: int, episodes: int, extra: list[str]) -> Path:
    """Train and evaluate one arm from the seed's base run."""
    name = f"seed{seed}-{arm}"
    arguments = [f"runs={folder}", f"name={name}", f"seed={seed}", f"base={folder / f'seed{seed}-base'}"]
    arguments += [f"evaluate.episodes={episodes}", "evaluate.base=false", *ARMS[arm], *extra]
    for module in ("vla.train", "vla.evaluate"):
        run_stage(module, arguments, folder / f"{name}.log")
    return folder / name


def successes(run: Path, evaluation: str) -> np.ndarray:
    """(E,) 0/1 per test start, in the manifest's order."""
    return np.array([float(r["success_at_end"]) for r in read_json_lines(run / "eval" / evaluation / "episodes.jsonl")])


def show(interval: Interval) -> str:
    """Estimate and bounds."""
    return f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def tabulate(folder: Path, seeds: list[int], arms: list[str], decoding: str) -> dict[str, Any]:
    """Print one decoding's table; returns its numbers."""
    tables = {"base": np.stack([successes(folder / f"seed{s}-base", f"base-{decoding}") for s in seeds])}
    for arm in arms:
        tables[arm] = np.stack([successes(folder / f"seed{s}-{arm}", f"final-{decoding}") for s in seeds])
    result: dict[str, Any] = {}
    print(f"\n{decoding} decoding, {len(seeds)} training seeds x {tables['base'].shape[1]} paired test starts")
    print("arm          success (by seed)                          minus base                minus real-only")
    for arm, table in tables.items():
        pooled = wilson_interval(int(table.sum()), table.size)
        gain = hierarchical_bootstrap(table, tables["base"], seed=0)
        row: dict[str, Any] = {"success": pooled.estimate, "by_seed": table.mean(1).tolist(), "minus_base": list(gain)}
        text = f"{arm:12s} {pooled.estimate:.3f} ({', '.join(f'{v:.3f}' for v in table.mean(1))})".ljust(54) + show(gain)
        if "real" in tables and arm not in ("base", "real"):
            difference = hierarchical_bootstrap(table, tables["real"], seed=0)
            row["minus_real"] = list(difference)
            text += "  " + show(difference)
        result[arm] = row
        print(text)
    return result


def spent(folder: Path, seeds: list[int], arms: list[str]) -> dict[str, Any]:
    """Real and imagined decisions, imagined share and seconds of training by arm, averaged over seeds."""
    rows: dict[str, Any] = {}
    print("\narm          real episodes  real decisions  imagined decisions  imagined share  trust at the end")
    for arm in arms:
        summaries = [read_json(folder / f"seed{s}-{arm}" / "summary.json") for s in seeds]
        metrics = [read_json_lines(folder / f"seed{s}-{arm}" / "metrics.jsonl") for s in seeds]
        keys = ("real_episodes", "real_decisions", "imagined_decisions")
        row = {key: float(np.mean([s["ledger"][key] for s in summaries])) for key in keys}
        row["imagined_share"] = float(np.mean([s["imagined_share"] for s in summaries]))
        row["trust"] = [m[-1].get("trust") for m in metrics]
        rows[arm] = row
        print(
            f"{arm:12s} {row['real_episodes']:13.0f}  {row['real_decisions']:14.0f}  {row['imagined_decisions']:18.0f}  "
            f"{row['imagined_share']:14.3f}  {', '.join(map(str, row['trust']))}"
        )
    return rows


def main() -> None:
    """Keys: seeds, arms (comma separated), episodes, folder; everything else is passed to every command."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    seeds = [int(s) for s in given.pop("seeds", "0,1,2").split(",")]
    arms = given.pop("arms", "real,uncorrected,wmrl").split(",")
    episodes, folder = int(given.pop("episodes", "400")), Path(given.pop("folder", "runs/arms"))
    extra = [f"{key}={value}" for key, value in given.items()]
    fixed = sorted({key for key in given for arm in ARMS.values() if any(word.startswith(f"{key}=") for word in arm)})
    if fixed:
        raise SystemExit(f"expected settings that no arm sets, got {', '.join(fixed)}: an arm would not be what it is called")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise SystemExit(f"expected arms out of {sorted(ARMS)}, got {unknown}")
    for seed in seeds:
        prepare_base(folder, seed, episodes, extra)
        for arm in arms:
            run_arm(folder, arm, seed, episodes, extra)
    result: dict[str, Any] = {"seeds": seeds, "episodes": episodes}
    for decoding in ("greedy", "sampled"):
        result[decoding] = tabulate(folder, seeds, arms, decoding)
    result["spent"] = spent(folder, seeds, arms)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
