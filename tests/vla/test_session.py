"""What a session promises: starts of one purpose are used for no other, and an arm fits the base run it begins from."""

from dataclasses import replace
from pathlib import Path

import pytest

from vla.config import PURPOSES, CollectConfig, RunConfig
from vla.session import Session, check_base
from wmrl.config import resolved_yaml
from wmrl.critic import CriticConfig


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
    group = replace(config.train, correction=replace(config.train.correction, group_size=4))
    with pytest.raises(ValueError, match="to have the same train.correction.group_size"):
        check_base(replace(config, train=group), tmp_path / "base")


def test_a_base_run_whose_rollouts_lack_what_the_critic_reads_is_refused(tmp_path: Path) -> None:
    config = RunConfig(runs=tmp_path)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))

    def reading(*inputs: str) -> RunConfig:
        return replace(config, train=replace(config.train, critic=CriticConfig(inputs=inputs)))

    check_base(reading("goal", "proprio"), tmp_path)  # the world model's entries, recorded already
    with pytest.raises(ValueError, match="to have the same privileged train.critic.inputs"):
        check_base(reading("time", "proprio"), tmp_path)


def test_a_base_run_with_settings_of_another_version_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("stage: 3\n")
    with pytest.raises(ValueError, match="expected settings of today in .*config.yaml, got others: unknown key stage"):
        check_base(RunConfig(runs=tmp_path), tmp_path)
