"""What a session promises: starts of one purpose are used for no other, and an arm fits the base run it begins from."""

from dataclasses import replace
from pathlib import Path

import pytest

from vla.config import CollectConfig, RunConfig
from vla.session import PURPOSES, Session, check_base
from wmrl.config import resolved_yaml


def test_purposes_and_run_seeds_never_share_a_start(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in (0, 1):
        with Session(RunConfig(runs=tmp_path, name=f"run{seed}", seed=seed, threads=1)) as session:
            for purpose in PURPOSES:
                hashes = {start.scene_hash for start in session.starts(purpose, 50)}
                assert len(hashes) == 50 and not hashes & seen
                seen |= hashes
            with pytest.raises(ValueError, match="expected at most 2000 starts for demonstrations .*, got 2001"):
                session.starts("demonstrations", 2001)


def test_a_base_run_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    config = RunConfig(runs=tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.yaml").write_text(resolved_yaml(replace(config, name="base")))
    check_base(config, tmp_path / "base")
    with pytest.raises(ValueError, match="to have the same seed"):
        check_base(replace(config, seed=3), tmp_path / "base")
    with pytest.raises(ValueError, match="to have the same collect"):
        check_base(replace(config, collect=CollectConfig(demonstrations=30)), tmp_path / "base")
