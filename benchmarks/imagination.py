"""What imagination costs: CPU seconds of an imagined chunk against a real one, side by side, and what fitting costs.

Run `python -m benchmarks.imagination`; prints a table and, last, one JSON line. Everything has the sizes of the default run,
one torch thread, and random weights: what a chunk costs depends on sizes, not on weights. (A better policy ends real rollouts
earlier; the cost is per chunk that was executed.) Imagination begins at first states here, which have to be rendered; at
keyframes nothing is rendered, but rows past their deadline are computed along with the rest of their wave. That an imagined
chunk is cheap says nothing about what it is worth.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sim.real import RealEnvironment
from tasks.starts import make_starts
from tasks.task import get_task
from vla.config import RunConfig
from vla.encoded import Beginnings, EncodedEnvironment
from vla.policy import ENCODED, ChunkPolicy
from vla.world_model import build_model
from wmrl.collect import collect, expand
from wmrl.types import Rollouts, concatenate
from world_model.imagination import ImaginedEnvironment
from world_model.latent import LatentWorldModel

SEED = 0


class Clock:
    """CPU seconds so far of this process and the simulator's workers (these in steps of 10 ms), messages included."""

    def __init__(self, environment: RealEnvironment) -> None:
        self._environment = environment

    def __call__(self) -> float:
        """Seconds."""
        return time.process_time() + sum(_process_seconds(pid) for pid in self._environment.worker_pids())


def _process_seconds(pid: int) -> float:
    """User and system time of a process, fields 14 and 15 of proc(5)."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Costs:
    """CPU seconds: per real chunk and the workers' part of it (simulation and pictures), per start for the first observation
    that imagination begins with, and per imagined chunk by batch width; chunks are how many were executed for real."""

    real: float
    simulation: float
    beginning: float
    imagined: dict[int, float]
    chunks: int


def sized(config: RunConfig, environment: RealEnvironment) -> ChunkPolicy:
    """A policy of the default run's size, seeded random weights."""
    encoder = replace(config.policy.encoder, proprio_size=environment.proprio_size, object_size=environment.object_size)
    torch.manual_seed(SEED)
    return ChunkPolicy(replace(config.policy, encoder=encoder)).eval()


def measure(config: RunConfig, widths: Sequence[int], num_waves: int) -> tuple[Costs, Rollouts, LatentWorldModel]:
    """Real waves at the simulator's width and imagined ones in turn, so that other load touches both alike."""
    task, group, simulator = get_task(config.task), config.train.correction.group_size, config.simulator
    starts = make_starts(task, "train", -(-max(num_waves * simulator.width, *widths) // group))
    rows, members = expand(starts, group)
    with RealEnvironment(task, width=simulator.width, num_workers=simulator.workers, chunk=config.policy.chunk) as environment:
        policy = sized(config, environment)
        real, clock = EncodedEnvironment(environment, policy), Clock(environment)
        collect(real, policy, make_starts(task, "train", 1, len(starts)), [0], seed=SEED)  # starts workers and language model
        begun = clock()
        beginnings = Beginnings(real, names=(*ENCODED, *config.world_model.latent.privileged))
        beginnings(starts)
        beginning = (clock() - begun) / len(starts)
        model = build_model(config, policy, beginnings)
        worlds = [
            ImaginedEnvironment(model.network, sizes=model.sizes, horizon=model.horizon, beginnings=beginnings, width=width)
            for width in widths
        ]
        waves, spent = [], torch.zeros(1 + len(widths), dtype=torch.float64)
        for number in range(num_waves):
            wave = slice(number * simulator.width, (number + 1) * simulator.width)
            times = [clock()]
            waves.append(collect(real, policy, rows[wave], members[wave], seed=SEED, record=config.recorded))
            times.append(clock())
            for world in worlds:
                collect(world, policy, rows[: world.width], members[: world.width], seed=SEED)
                times.append(clock())
            spent += torch.tensor(times, dtype=torch.float64).diff()
    played = concatenate(waves)
    chunks = played.num_decisions()
    per_row = spent[1:] / (len(waves) * model.horizon)
    imagined = {width: float(seconds) / width for width, seconds in zip(widths, per_row, strict=True)}
    return Costs(float(spent[0]) / chunks, float(played.seconds.sum()) / chunks, beginning, imagined, chunks), played, model


def fitting(model: LatentWorldModel, rollouts: Rollouts, steps: int) -> float:
    """CPU seconds of a fit per gradient step, measured over at least `steps`, the straight lines included."""
    model.config = replace(model.config, min_steps=steps)
    begun = time.process_time()
    losses = model.fit(rollouts, seed=SEED)
    return (time.process_time() - begun) / losses["fit_steps"]


def fit_steps(config: RunConfig, horizon: int) -> tuple[int, int]:
    """Gradient steps of the first fit, and of all fits of a run with it: the exam's, one a fold, and the refits on all data so
    far, each from scratch. No rollout ends early here, so both are upper bounds."""
    world, train, latent = config.world_model, config.train, config.world_model.latent

    def steps(transitions: float) -> int:
        return max(latent.min_steps, round(latent.passes * transitions / latent.batch_size))

    base = world.base_groups * train.correction.group_size * horizon
    perturbed = world.perturbed * horizon
    fold = base * (world.exam.folds - 1) / world.exam.folds + perturbed
    per_step = train.correction.real_groups * train.correction.group_size * horizon
    refits = range(train.refresh_every, train.steps + 1, train.refresh_every)
    first = steps(base + perturbed)
    refitted = sum(steps(base + perturbed + per_step * done) for done in refits)
    return first, first + world.exam.folds * steps(fold) + refitted


def summarise(config: RunConfig, costs: Costs, fit: float, horizon: int) -> dict[str, Any]:
    """The headline takes the widest imagined batch and counts the first observation as if every group had a new start."""
    width = max(costs.imagined)
    imagined = costs.imagined[width] + costs.beginning / (config.train.correction.group_size * horizon)
    saved = horizon * (costs.real - imagined)
    first_fit, all_fits = (fit * count for count in fit_steps(config, horizon))
    return {
        "benchmark": "imagination",
        "n": costs.chunks,
        "real_width": config.simulator.width,
        "imagined_width": width,
        "real_cpu_seconds_per_chunk": costs.real,
        "real_simulation_cpu_seconds_per_chunk": costs.simulation,
        "imagined_cpu_seconds_per_chunk": imagined,
        "imagined_step_cpu_seconds_per_chunk": {str(width): seconds for width, seconds in costs.imagined.items()},
        "first_observation_cpu_seconds": costs.beginning,
        "ratio": costs.real / imagined,
        "fit_cpu_seconds": first_fit,
        "fit_break_even_episodes": first_fit / saved,
        "run_fit_cpu_seconds": all_fits,
        "run_fit_break_even_episodes": all_fits / saved,
    }


def show(result: dict[str, Any]) -> None:
    """The table, then the JSON line."""
    width, wide = result["real_width"], result["imagined_width"]
    lines = {
        f"real chunk, width {width}": "real_cpu_seconds_per_chunk",
        "  of it simulation and pictures": "real_simulation_cpu_seconds_per_chunk",
        "first observation, once per start": "first_observation_cpu_seconds",
    }
    table = {name: result[key] for name, key in lines.items()}
    steps = result["imagined_step_cpu_seconds_per_chunk"]
    table |= {f"imagined chunk, width {width}": seconds for width, seconds in steps.items()}
    table[f"  width {wide}, every group at a new start"] = result["imagined_cpu_seconds_per_chunk"]
    for name, seconds in table.items():
        print(f"{name:42s} {1e3 * seconds:10.3f} CPU ms")
    print(f"{'real / imagined (the last)':42s} {result['ratio']:10.1f} times, n {result['n']} real chunks")
    for key, name in (("fit", "first fit of a default run, at most"), ("run_fit", "all fits of a default run, at most")):
        seconds, episodes = result[f"{key}_cpu_seconds"], result[f"{key}_break_even_episodes"]
        print(f"{name:42s} {seconds:10.1f} CPU s = what {episodes:.0f} real episodes cost more than imagined ones")
    print(json.dumps(_rounded(result)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    config = RunConfig()
    widths = [config.simulator.width, config.world_model.width]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=widths, help="imagined rollouts at once")
    parser.add_argument("--waves", type=int, default=4, help="real waves, each of as many rollouts as the simulator is wide")
    steps = config.world_model.latent.min_steps
    parser.add_argument("--fit-steps", type=int, default=steps, help="least steps of the measured fit; costs are scaled")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    costs, played, model = measure(config, sorted(set(chosen.widths)), chosen.waves)
    show(summarise(config, costs, fitting(model, played, chosen.fit_steps), model.horizon))


if __name__ == "__main__":
    main()
