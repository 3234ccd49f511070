"""The measures of the gradient benchmark give known answers where the signal is known, and nothing where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gradient import agreement, held_out_gain

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("length", [0.0, 3.0])
def test_agreement_is_the_share_of_signal_in_the_squared_length(length):
    generator = torch.Generator().manual_seed(0)
    signal = torch.zeros(50)
    signal[0] = length
    measured = agreement(signal + torch.randn(400, 50, generator=generator))
    assert measured.value == pytest.approx(length**2 / (length**2 + 50), abs=4 * measured.error)
    assert 0 < measured.error < 0.02


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 0.0), (0.5, 0.5)])
def test_held_out_gain_finds_the_slope_of_the_outcome(slope, expected):
    """One decision, scores of unit variance: a unit natural step along the first number raises the outcome by the slope."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4000, 1, 5, generator=generator)
    outcome = slope * scores[..., 0] + 0.5 * torch.randn(4000, 1, generator=generator)
    measured = held_out_gain(scores, outcome, torch.arange(4000) % 8)
    assert measured.value == pytest.approx(expected, abs=4 * measured.error + 0.01)
    assert measured.error < 0.03


def test_unknown_key_and_too_few_parts_are_refused():
    for word, message in (("strats=8", "expected keys out of"), ("parts=2", "expected 3 to 64 parts")):
        done = subprocess.run([sys.executable, "-m", "benchmarks.gradient", word], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0 and message in done.stderr


@pytest.mark.slow
def test_the_last_line_is_one_json_object(tmp_path):
    settings = [f"runs={tmp_path}", "name=base", "size=smoke"]
    for command in ("vla.collect", "vla.sft"):
        subprocess.run([sys.executable, "-m", command, *settings], cwd=ROOT, check=True, capture_output=True)
    words = [f"base={tmp_path / 'base'}", "starts=4", "parts=4"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gradient", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == "gradient" and result["n"] == 8
