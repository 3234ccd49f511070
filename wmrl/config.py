"""From YAML and `key=value` words to one checked, frozen dataclass: Hydra composes, this file checks, nothing else sees Hydra.

Defaults and documentation live in the dataclasses; the YAML only names choices. Hydra alone accepts a misspelt key with `+`,
turns `clip=None` into a string and takes the last of two equal overrides (Hydra issues 1951 and 1457), therefore everything
composed is compared with the schema before any work begins. The working folder is never changed, no output folder is made.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wmrl.config_types import ConfigError, build, is_schema, nested_schema, required_fields
from wmrl.names import nearest

__all__ = [
    "ConfigError", "config_to_dict", "known_keys", "load_config", "load_resolved", "resolved_yaml", "schema_defaults",
]  # fmt: skip


def load_config[T](name: str, overrides: Sequence[str], schema: type[T], *, folder: Path | None = None) -> T:
    """Compose `<name>.yaml` of `folder` (default: the `configs` package) with the overrides into a `schema`.

    Overrides are Hydra's: `key.sub=value`, `group=choice`, `~key`. Raises ConfigError, with the full key and the nearest known
    one, for anything unknown, repeated, or of a wrong type, and for whatever the `__post_init__` of a dataclass refuses.
    """
    folder = _configs_folder() if folder is None else folder
    composed = _compose(name, _checked_overrides(overrides, schema, folder), folder)
    try:
        merged = OmegaConf.merge(OmegaConf.create(schema_defaults(schema)), composed)
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration {name}: {_first_line(error)}") from error
    return _checked(values, schema)


def known_keys(schema: type) -> list[str]:
    """Every key of a schema with its groups, in order of definition: ["seed", "trainer", "trainer.steps", ...]."""
    keys = []
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        keys.append(field.name)
        nested = nested_schema(hints[field.name])
        if nested is not None:
            keys += [f"{field.name}.{key}" for key in known_keys(nested)]
    return keys


def config_to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dicts, lists, strings and numbers (tuples become lists, paths and enums their text)."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def resolved_yaml(config: Any) -> str:
    """The resolved configuration as YAML; `load_config` with the same values gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))


def load_resolved[T](path: Path, schema: type[T]) -> T:
    """The config that `resolved_yaml` wrote to `path`; the same checks as `load_config`."""
    values = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(values, dict):
        raise ConfigError(f"expected a configuration in {path}, got no keys")
    return _checked(values, schema)


def _checked[T](values: Any, schema: type[T]) -> T:
    plain = {str(key): value for key, value in values.items()}
    _refuse_unknown(plain, schema, known_keys(schema), prefix="")
    return build(schema, plain, "")


def _plain(value: Any) -> Any:
    if is_schema(type(value)):
        return config_to_dict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _configs_folder() -> Path:
    import configs

    return Path(configs.__path__[0])


def schema_defaults(schema: type) -> dict[str, Any]:
    """The defaults of a schema, so that YAML may interpolate keys that it does not set. Required fields are left out."""
    hints = get_type_hints(schema)
    missing = required_fields(schema)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        nested = nested_schema(hints[field.name])
        if field.name in missing:
            if nested is not None:
                values[field.name] = schema_defaults(nested)
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = _plain(field.default_factory())
        else:
            values[field.name] = _plain(field.default)
    return values


def _checked_overrides(overrides: Sequence[str], schema: type, folder: Path) -> list[str]:
    """Overrides in the form that Hydra applies without an opinion of its own: the schema check has the last word on keys."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    seen: dict[str, str] = {}
    checked = []
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(f"expected key=value, got the flag {word}; write {word.lstrip('-')} (and --help for the keys)")
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(f"expected key=value, got {word!r}: {_first_line(error)}") from error
        key = override.key_or_group
        if key in seen:
            raise ConfigError(f"expected each key once, got {seen[key]} and {word}; remove one")
        seen[key] = word
        if override.is_sweep_override():
            raise ConfigError(f"expected one value for {key}, got several in {word}; start one run for each, or quote the text")
        if override.is_delete() or (folder / key).is_dir():
            checked.append(word)
            continue
        if key.replace("/", ".") not in known_keys(schema) and not _inside_mapping(key, schema):
            raise ConfigError(f"unknown key {key}{nearest(key, known_keys(schema))}")
        checked.append(f"++{word.lstrip('+')}")
    return checked


def _inside_mapping(key: str, schema: type) -> bool:
    """Whether the key addresses an entry of a `dict[str, ...]` field, whose entries the schema cannot list."""
    hints = get_type_hints(schema)
    head, _, rest = key.partition(".")
    if head not in hints or not rest:
        return False
    nested = nested_schema(hints[head])
    return _inside_mapping(rest, nested) if nested is not None else getattr(hints[head], "__origin__", None) is dict


def _compose(name: str, overrides: list[str], folder: Path) -> Any:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    if not (folder / f"{name}.yaml").is_file():
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(f"expected one of the configurations {names}, got {name}{nearest(name, names)}")
    try:
        with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            return compose(config_name=name, overrides=overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"configuration {name}: {_with_nearest_choice(str(error), folder)}") from error


def _with_nearest_choice(message: str, folder: Path) -> str:
    """Hydra's `Could not find 'modle/small'`, on one line and with the nearest choice that exists."""
    choices = [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml"))]
    text = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    wanted = message.split("Could not find '")[-1].split("'")[0] if "Could not find '" in message else ""
    return text + (nearest(wanted, choices) if wanted else "")


def _refuse_unknown(values: dict[str, Any], schema: type, keys: list[str], prefix: str) -> None:
    hints = get_type_hints(schema)
    names = {field.name for field in dataclasses.fields(schema)}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in names:
            raise ConfigError(f"unknown key {full}{nearest(full, keys)}")
        nested = nested_schema(hints[key])
        if nested is not None and isinstance(value, dict):
            _refuse_unknown(value, nested, keys, f"{full}.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
