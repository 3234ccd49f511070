"""The benchmark of imagination runs in its smallest size, its last line is a result, and it counts the fits of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.imagination import fit_steps
from vla.config import RunConfig, TrainConfig, WorldModelConfig
from wmrl.correction import CorrectionConfig
from world_model.exam import ExamConfig
from world_model.latent import LatentConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_last_line_is_one_json_object_whose_numbers_fit_together():
    words = ["--widths", "2", "8", "--waves", "1", "--fit-steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.imagination", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == "imagination"
    assert result["n"] == 80  # random weights lift nothing: sixteen rollouts of five chunks
    assert (result["real_width"], result["imagined_width"]) == (16, 8)
    assert set(result["imagined_step_cpu_seconds_per_chunk"]) == {"2", "8"}
    ratio = result["real_cpu_seconds_per_chunk"] / result["imagined_cpu_seconds_per_chunk"]
    assert result["ratio"] == pytest.approx(ratio, rel=2e-3)
    assert result["run_fit_cpu_seconds"] > result["fit_cpu_seconds"] > 0
    first, every = fit_steps(RunConfig(), horizon=5)
    assert result["run_fit_cpu_seconds"] / result["fit_cpu_seconds"] == pytest.approx(every / first, rel=2e-3)


def test_the_steps_of_a_run_are_those_of_each_fit_from_scratch():
    """Chunks: 4 groups of 2 rollouts of 5 are 40, 2 perturbed ones 10, each step adds 2 groups, 20; a fifth as many steps."""
    latent = LatentConfig(passes=2.0, batch_size=10, min_steps=9)
    config = RunConfig(
        world_model=WorldModelConfig(base_groups=4, perturbed=2, latent=latent, exam=ExamConfig(folds=2)),
        train=TrainConfig(steps=5, refresh_every=2, correction=CorrectionConfig(group_size=2, real_groups=2)),
    )
    folds = 9 + 9  # 30 chunks each: 6 steps, raised to the least number
    refits = 18 + 26  # after steps 2 and 4, on 90 and 130 chunks
    assert fit_steps(config, horizon=5) == (10, 10 + folds + refits)
