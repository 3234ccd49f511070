"""What recording videos promises: whatever it plays is in the ledger, free and under its own name."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.vla.worlds import ConstantPolicy, RuleWorld
from vla import videos
from vla.evaluation import evaluation_starts
from vla.world_model import FRAMES
from wmrl.ledger import Ledger
from wmrl.types import Observation, Start, Status

FOUR = evaluation_starts("lift_cube", "validation", 4)
POLICY: Any = ConstantPolicy()


class FilmedWorld(RuleWorld):
    """Never solved; has camera frames, and the interface of the simulator that films."""

    def __init__(self, *, imagined: bool = False) -> None:
        super().__init__(lambda start, action, decision: (0.0, Status.RUNNING), width=4, imagined=imagined)
        self.asked: list[list[int]] = []

    def record_frames(self, rows: Sequence[int], **_: Any) -> None:
        self.asked.append(list(rows))

    def frames(self) -> list[np.ndarray]:
        return [np.zeros((2, 8, 8, 3), np.uint8)] * self.width

    def _observation(self) -> Observation:
        pixels = torch.zeros(len(self.starts), 8, 8, 3, dtype=torch.uint8)
        return {**super()._observation(), **dict.fromkeys(FRAMES, pixels)}


@pytest.fixture
def session() -> Any:
    world = FilmedWorld()
    task = SimpleNamespace(control_frequency=20)
    return SimpleNamespace(environment=world, encoded=lambda policy: world, ledger=Ledger(), task=task)


def counts(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """Purpose of the free book -> decisions, episodes; the real and the imagined book must be empty."""
    spent = ledger.summary()
    assert spent["real"] == spent["imagined"] == {}
    return {purpose: (entry["decisions"], entry["episodes"]) for purpose, entry in spent["free"].items()}


def test_filmed_episodes_are_booked_as_free(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(videos, "write_video", lambda path, frames, fps: written.append(path.name))
    videos.real_videos(session, tmp_path, POLICY, FOUR, "base")
    assert counts(session.ledger) == {"videos": (12, 4)} and len(written) == 4
    assert session.environment.asked == [[0, 1, 2, 3], []]


def test_twins_are_booked_as_free_and_apart(session: Any) -> None:
    starts: list[Start] = FOUR[:3]
    real, twin = videos.twins(session, POLICY, FilmedWorld(imagined=True), starts)
    assert counts(session.ledger) == {"videos": (9, 3), "videos, imagined": (9, 3)}
    assert real.inputs["pixels/wrist"].shape == (3, 3, 8, 8, 3) and twin.imagined and not real.imagined
