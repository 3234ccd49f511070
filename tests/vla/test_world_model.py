"""What the world-model stage books: perturbed demonstrations, and apart what looking ahead for them cost."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.vla.worlds import ConstantPolicy, RuleWorld
from vla.config import RunConfig
from vla.evaluation import evaluate, evaluation_starts
from vla.session import Session
from vla.world_model import PLANNING, book_perturbed
from wmrl.state_files import load_rollouts, save_rollouts
from wmrl.types import Status


def test_looking_ahead_is_booked_once_with_its_decisions_and_seconds(tmp_path: Path) -> None:
    world = RuleWorld(lambda start, action, decision: (0.0, Status.RUNNING), width=2)
    played = evaluate(world, ConstantPolicy(), evaluation_starts("lift_cube", "test", 2), greedy=True)
    save_rollouts(tmp_path / "perturbed.safetensors", replace(played, extra={"planning_seconds": torch.tensor([0.25, 0.5])}))
    rollouts = load_rollouts(tmp_path / "perturbed.safetensors")
    with Session(RunConfig(runs=tmp_path, threads=1)) as session:
        book_perturbed(session, rollouts)
        book_perturbed(session, rollouts)
        booked = session.ledger.summary()["real"]
    assert booked[PLANNING] == {"decisions": 6, "episodes": 0, "seconds": 0.75}
    assert booked["perturbed demonstrations"] == {"decisions": 6, "episodes": 2, "seconds": pytest.approx(0.6)}
