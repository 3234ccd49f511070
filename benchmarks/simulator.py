"""What the real world costs: lean stepping against stock robosuite side by side, pictures, whole episodes, start-up and memory.

Run `python -m benchmarks.simulator`; prints a table and, last, one JSON line. Steps and pictures are CPU time in alternating
blocks, so that other load on the machine touches both sides alike.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sim.opengl import prepare

BLOCKS = 7
STEPS = 40


def side_by_side(parts: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median CPU milliseconds of each part over alternating blocks."""
    spent: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(BLOCKS):
        for name, part in parts.items():
            begun = time.process_time()
            part()
            spent[name].append(1e3 * (time.process_time() - begun))
    return {name: statistics.median(values) for name, values in spent.items()}


def stepping(simulation: Any, stock: Any) -> dict[str, float]:
    """CPU milliseconds per control step, lean and stock, on the same random actions."""
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7))

    def lean() -> None:
        simulation.reset(0)
        for action in actions:
            simulation.control_step(action)

    def original() -> None:
        for action in actions:
            stock.step(action)

    parts = side_by_side({"lean": lean, "stock": original})
    return {name: spent / STEPS for name, spent in parts.items()}


def pictures(simulation: Any, task: Any) -> dict[str, float]:
    """CPU milliseconds per 64x64 picture, cheap and full quality, both cameras averaged."""
    from sim.model import load_model
    from sim.rendering import Renderer
    from sim.simulation import Simulation

    double = Simulation(load_model(task, full=True))
    cheap, full = Renderer(simulation.compiled, 64), Renderer(double.compiled, 64, full=True)
    renderers = {"frame": (cheap, simulation), "full_frame": (full, double)}

    def draw(renderer: Any, source: Any) -> Callable[[], None]:
        def part() -> None:
            for camera in task.cameras * 5:
                renderer.render(source.data, camera)

        source.reset(0)
        return part

    spent = side_by_side({name: draw(*pair) for name, pair in renderers.items()})
    for renderer, _ in renderers.values():
        renderer.close()
    return {name: value / 10 for name, value in spent.items()}


def workers(task: Any) -> dict[str, float]:
    """Start-up wall seconds, episode CPU and wall seconds, resident megabytes per worker: two workers, 16 rows, 64 steps."""
    import torch

    from sim.real import RealEnvironment
    from tasks.starts import make_starts

    begun = time.perf_counter()
    with RealEnvironment(task, width=16, num_workers=2) as environment:
        environment.reset(make_starts(task, "train", 16))
        started = time.perf_counter()
        seconds = sum(float(environment.step(torch.zeros(16, 8, 7)).seconds.sum()) for _ in range(environment.max_decisions))
        played = time.perf_counter()
        memory = [resident_megabytes(pid) for pid in environment.worker_pids()]
    return {
        "start_wall_seconds": started - begun,
        "episode_cpu_seconds": seconds / 16,
        "episode_wall_seconds": (played - started) / 16,
        "worker_megabytes": max(memory),
    }


def resident_megabytes(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Measure and print."""
    prepare()
    os.environ.setdefault("LP_NUM_THREADS", "0")  # as in the workers
    from sim.model import load_model, stock_environment
    from sim.simulation import Simulation
    from tasks.task import get_task

    task = get_task("lift_cube")
    simulation = Simulation(load_model(task))
    simulation.reset(0)
    simulation.control_step(np.zeros(7))
    stock = stock_environment(task)
    stock.reset()
    stock.step(np.zeros(7))
    result = {f"{name}_step_ms": value for name, value in stepping(simulation, stock).items()}
    result["step_speedup"] = result["stock_step_ms"] / result["lean_step_ms"]
    result |= {f"{name}_ms": value for name, value in pictures(simulation, task).items()} | workers(task)
    for name, value in result.items():
        print(f"{name:24s} {value:10.3f}")
    print(json.dumps({"benchmark": "simulator", **{name: round(value, 4) for name, value in result.items()}}))


if __name__ == "__main__":
    main()
