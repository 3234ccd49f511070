"""Composed settings are checked whole: a wrong key, type or word fails at once and names the right one."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from wmrl.command import help_text, run_command
from wmrl.config import ConfigError, known_keys, load_config, load_resolved, resolved_yaml


class Mode(enum.Enum):
    REAL = "real"
    AUTO = "auto"


@dataclass(frozen=True)
class ModelConfig:
    """The cheap world."""

    width: int = 64
    """Units per layer."""
    layers: tuple[int, ...] = (2, 2)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"expected a width of at least 1, got {self.width}")


@dataclass(frozen=True)
class TrainerConfig:
    steps: int = 10
    """Training steps."""
    clip: float | None = 0.2
    mode: Mode = Mode.AUTO
    decode: Literal["greedy", "sampled"] = "sampled"
    debias: bool = True
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    task: str
    run: Path = Path("runs/demo")
    seed: int = 0
    trainer: TrainerConfig = TrainerConfig()
    model: ModelConfig = ModelConfig()
    reference: ModelConfig | None = None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("width: 8\n")
    (tmp_path / "model" / "large.yaml").write_text("width: 512\nlayers: [4, 4, 4]\n")
    (tmp_path / "model" / "broken.yaml").write_text("widht: 8\n")
    (tmp_path / "train.yaml").write_text("defaults: [{model: small}, _self_]\ntask: lift\ntrainer: {steps: 5}\n")
    return tmp_path


def compose(folder: Path, *overrides: str) -> RunConfig:
    return load_config("train", overrides, RunConfig, folder=folder)


def test_yaml_chooses_and_dataclass_defaults_fill_the_rest(folder):
    config = compose(folder)
    assert (config.task, config.seed, config.trainer.steps, config.trainer.clip) == ("lift", 0, 5, 0.2)
    assert config.model == ModelConfig(width=8, layers=(2, 2))


def test_overrides_reach_keys_that_no_yaml_sets(folder):
    config = compose(folder, "seed=3", "trainer.clip=null", "trainer.mode=real", "model=large", "model.width=9", "run=/x/y")
    assert (config.seed, config.trainer.clip, config.trainer.mode, config.run) == (3, None, Mode.REAL, Path("/x/y"))
    assert config.model == ModelConfig(width=9, layers=(4, 4, 4))


def test_yaml_may_interpolate_a_default_that_only_the_dataclass_has(folder):
    (folder / "train.yaml").write_text("task: lift\ntrainer: {steps: '${seed}'}\nseed: 7\nmodel: {width: '${trainer.steps}'}\n")
    assert compose(folder).model.width == 7


@pytest.mark.parametrize(
    ("override", "key", "advice"),
    [
        ("trainer.stesp=3", "trainer.stesp", "trainer.steps"),
        ("+trainer.stesp=3", "trainer.stesp", "trainer.steps"),
        ("++trainer.stesp=3", "trainer.stesp", "trainer.steps"),
        ("steps=3", "steps", "trainer.steps"),
        ("modle=small", "modle", "model"),
        ("model=smal", "smal", "model/small"),
        ("model=broken", "model.widht", "model.width"),
        ("hydra.run.dir=x", "hydra.run.dir", ""),
        ("trainer={stesp: 3}", "trainer.stesp", "trainer.steps"),
        ("reference.widht=3", "reference.widht", "reference.width"),
        ("~trainer.stesp", "stesp", ""),
        ("--seed=3", "--seed=3", "write seed=3"),
        ("seed", "seed", "key=value"),
        ("seed=1,2", "seed", "one value"),
    ],
)
def test_unknown_key_fails_with_the_full_key_and_the_nearest(folder, override, key, advice):
    with pytest.raises(ConfigError) as caught:
        compose(folder, override)
    assert key in str(caught.value) and advice in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "key", "advice"),
    [
        ("defaults: [{modle: small}, _self_]\ntask: lift\n", "modle/small", "model/small"),
        ("default: [{model: small}]\ntask: lift\n", "default", ""),
        ("task: lift\ntrainer: {stesp: 3}\n", "trainer.stesp", "trainer.steps"),
        ("trainer: {steps: 3}\n", "task", "task=..."),
        ("task: lift\nrun: no\n", "run", "text"),
        ("task: lift\ntask: stack\n", "duplicate", ""),
    ],
)
def test_wrong_yaml_fails_and_names_the_key(folder, yaml, key, advice):
    (folder / "train.yaml").write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        compose(folder)
    assert key in str(caught.value) and advice in str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("trainer.clip=None", "write trainer.clip=null"),
        ("trainer.steps=1e3", "write trainer.steps=1000"),
        ("trainer.steps=2.5", "trainer.steps: expected an integer"),
        ("trainer.steps=true", "trainer.steps: expected an integer"),
        ("trainer.steps=null", "trainer.steps: expected an integer, got nothing"),
        ("trainer.clip=a", "trainer.clip: expected a number"),
        ("trainer.debias=1", "trainer.debias: expected true or false"),
        ("trainer.mode=raal", "expected one of ['real', 'auto'], got 'raal', did you mean real?"),
        ("trainer.decode=gredy", "did you mean greedy?"),
        ("model.layers=3", "model.layers: expected a list"),
        ("model.layers=[2,x]", "model.layers[1]: expected an integer"),
        ("trainer=3", "trainer"),
        ("task=true", "task: expected text"),
        ("model.width=0", "model: expected a width of at least 1, got 0"),
        ("trainer.weights.a=x", "trainer.weights.a: expected a number"),
    ],
)
def test_wrong_value_fails_and_says_what_to_write(folder, override, text):
    with pytest.raises(ConfigError) as caught:
        compose(folder, override)
    assert text in str(caught.value)


def test_repeated_override_is_refused(folder):
    with pytest.raises(ConfigError, match="trainer.steps=3 and trainer.steps=4"):
        compose(folder, "trainer.steps=3", "trainer.steps=4")


def test_unknown_configuration_names_the_nearest(folder):
    with pytest.raises(ConfigError, match="did you mean train"):
        load_config("trian", [], RunConfig, folder=folder)


def test_entries_of_a_mapping_are_free(folder):
    assert compose(folder, "trainer.weights.anything=2").trainer.weights == {"anything": 2.0}


def test_resolved_yaml_gives_the_same_config_back(folder, tmp_path):
    config = compose(folder, "model=large", "trainer.clip=1e-4", "trainer.mode=real", "task='012'", "reference={width: 3}")
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert config.task == "012"
    assert load_resolved(tmp_path / "resolved.yaml", RunConfig) == config


def test_composing_leaves_no_global_state(folder):
    from hydra.core.global_hydra import GlobalHydra

    compose(folder)
    assert not GlobalHydra.instance().is_initialized()


def test_help_lists_every_key_with_its_document():
    text = help_text("train", RunConfig)
    assert all(key in text for key in known_keys(RunConfig))
    assert "trainer.steps (int, 10) Training steps." in text
    assert "task (str, required)" in text


def test_bad_input_is_one_sentence_and_status_2(capsys):
    def never(config: RunConfig) -> None:
        raise AssertionError("work began")

    assert run_command(never, "no-such-configuration", RunConfig, []) == 2
    assert capsys.readouterr().err.startswith("error: expected one of the configurations")


def test_a_command_works_from_any_folder_and_exits_non_zero_on_a_misspelt_key(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\nfrom dataclasses import dataclass\nfrom pathlib import Path\nfrom wmrl.command import run_command\n"
        "@dataclass(frozen=True)\nclass Trainer:\n    steps: int = 1\n"
        "@dataclass(frozen=True)\nclass Run:\n    trainer: Trainer = Trainer()\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "sys.exit(run_command(lambda c: print(c.trainer.steps), 'run', Run, folder=folder))\n"
    )
    (tmp_path / "run.yaml").write_text("trainer: {steps: 2}\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    results = [
        subprocess.run([sys.executable, script, word], cwd="/", env=environment, capture_output=True, text=True)
        for word in ("trainer.steps=4", "+trainer.stesp=4")
    ]
    assert (results[0].returncode, results[0].stdout) == (0, "4\n")
    assert results[1].returncode == 2
    assert results[1].stderr == "error: unknown key trainer.stesp, did you mean trainer.steps?\n"
