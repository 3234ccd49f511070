"""The shipped YAML: every file composes, every key is one that the schema reads, unknown keys fail.

A top-level file names its schema in its first line: `# schema: vla.config:RunConfig`. A file in a folder is a choice of that
group and is composed under every top-level file whose defaults list knows the group.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from wmrl.command import help_text
from wmrl.config import ConfigError, config_to_dict, known_keys, load_config, load_resolved, resolved_yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TOP = sorted(CONFIGS.glob("*.yaml"))
GROUP = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent != CONFIGS)


def schema_of(path: Path) -> type:
    """The dataclass named in the first line of a top-level YAML file."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("# schema: "), (
        f"{path.name}: the first line must be `# schema: package.module:Class`, got {first!r}"
    )
    module, name = first.removeprefix("# schema: ").split(":")
    return getattr(importlib.import_module(module.strip()), name.strip())


def groups_of(path: Path) -> set[str]:
    """Groups in the defaults list of a top-level file."""
    content: Any = OmegaConf.load(path)
    defaults = content.get("defaults", [])
    return {key.split()[-1] for entry in defaults if not isinstance(entry, str) for key in entry}


def choices() -> list[tuple[Path, Path]]:
    """(top-level file, group file) for every choice that can be made."""
    return [(top, group) for top in TOP for group in GROUP if group.parent.relative_to(CONFIGS).as_posix() in groups_of(top)]


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.stem)
def test_every_command_composes_and_its_resolved_yaml_reads_back(path, tmp_path):
    schema = schema_of(path)
    config: Any = load_config(path.stem, [], schema)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert load_resolved(tmp_path / "config.yaml", schema) == config
    assert set(flat(config_to_dict(config))) <= set(known_keys(schema)) | mapping_entries(config)


@pytest.mark.parametrize(("top", "group"), choices(), ids=lambda path: path.relative_to(CONFIGS).with_suffix("").as_posix())
def test_every_choice_composes(top, group):
    name = group.parent.relative_to(CONFIGS).as_posix()
    assert isinstance(load_config(top.stem, [f"{name}={group.stem}"], schema_of(top)), schema_of(top))


def test_every_group_file_is_a_choice_of_some_command():
    assert {group for _, group in choices()} == set(GROUP)


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.stem)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_misspelt_key_fails_and_names_the_nearest(path, prefix):
    schema = schema_of(path)
    for key in [key for key in known_keys(schema) if len(key.split(".")[-1]) > 4][::7]:
        with pytest.raises(ConfigError) as caught:
            load_config(path.stem, [f"{prefix}{key}x=1"], schema)
        assert f"unknown key {key}x, did you mean " in str(caught.value)


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.stem)
def test_every_default_is_frozen(path):
    def check(value: Any) -> None:
        if dataclasses.is_dataclass(value):
            kind: Any = type(value)
            assert kind.__dataclass_params__.frozen, f"{kind.__name__} is not frozen"
            for field in dataclasses.fields(value):
                check(getattr(value, field.name))

    check(load_config(path.stem, [], schema_of(path)))


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.stem)
def test_help_lists_every_key(path):
    schema = schema_of(path)
    text = help_text(path.stem, schema)
    assert all(key in text for key in known_keys(schema))


def flat(values: dict, prefix: str = "") -> list[str]:
    """Every full key of nested dicts."""
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += flat(value, f"{prefix}{key}.")
    return keys


def mapping_entries(config: Any, prefix: str = "") -> set[str]:
    """Full keys inside `dict[str, ...]` fields, whose entries no schema lists."""
    found: set[str] = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict):
            found |= set(flat(value, f"{prefix}{field.name}."))
        elif dataclasses.is_dataclass(value):
            found |= mapping_entries(value, f"{prefix}{field.name}.")
    return found
