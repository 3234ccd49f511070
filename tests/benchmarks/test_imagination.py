"""The benchmark of imagination runs in its smallest size, and its last line is a result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_last_line_is_one_json_object_whose_numbers_fit_together():
    words = ["--widths", "2", "8", "--waves", "1", "--passes", "1"]
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
