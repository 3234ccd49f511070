"""Plain values to typed, frozen dataclasses: which value may stand in which field, and what to write instead."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from wmrl.names import nearest


class ConfigError(ValueError):
    """A setting that cannot be used: what was expected, what was got, what to do."""


def is_schema(hint: Any) -> bool:
    """Whether a type is a dataclass, a group of keys."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def nested_schema(hint: Any) -> type | None:
    """The dataclass behind `Group` or `Group | None`, else None."""
    for candidate in (hint, *_union_members(hint)):
        if is_schema(candidate):
            return candidate
    return None


def required_fields(schema: type) -> set[str]:
    """Names of the fields without a default."""
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(schema) if f.default is missing and f.default_factory is missing}


def build[T](schema: type[T], values: Mapping[str, Any], key: str) -> T:
    """A `schema` from plain values; `key` is the full key of the group ("" at the top). Raises ConfigError."""
    hints = get_type_hints(schema)
    missing = sorted(required_fields(schema) - set(values))
    if missing:
        raise ConfigError(f"expected a value for {_join(key, missing[0])}, got none; write {_join(key, missing[0])}=...")
    typed = {name: convert(hints[name], value, _join(key, name)) for name, value in values.items()}
    try:
        return schema(**typed)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`: dataclasses, bool, int, float, str, Path, enums, Literal, list, tuple, dict, and `| None`."""
    members = _union_members(hint)
    if isinstance(value, str) and value in ("None", "none"):
        raise ConfigError(f"{key}: expected a value, got the word {value}; write {key}=null for no value")
    if value is None and (hint is Any or type(None) in members):
        return None
    if members:
        return convert(_only_member(members, key), value, key)
    origin = get_origin(hint)
    if is_schema(hint):
        if not isinstance(value, Mapping):
            raise _wrong(key, f"a group of keys ({', '.join(f.name for f in dataclasses.fields(hint))})", value)
        return build(hint, value, key)
    if origin in (list, tuple):
        return _convert_sequence(hint, value, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(key, "a mapping {name: value}", value)
        return {str(name): convert(get_args(hint)[1], item, _join(key, str(name))) for name, item in value.items()}
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return _convert_choice(hint, value, key)
    return _convert_scalar(hint, value, key)


def _convert_scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is Any:
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value
    if hint is int:
        if isinstance(value, float) and value.is_integer():
            raise _wrong(key, "an integer", value, f"write {key}={int(value)}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(key, "an integer", value)
        return value
    if hint is float:
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            raise _wrong(key, "a number", value)
        return float(value)
    if hint in (str, Path):
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # `run=3` means the name 3
        if not isinstance(value, str):
            raise _wrong(key, "text", value, f"""write {key}="'{value}'" if the text is meant""")
        return hint(value)
    raise TypeError(f"{key}: the schema's type {hint!r} is not one that YAML can fill")


def _convert_sequence(hint: Any, value: Any, key: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(key, "a list [a,b,...]", value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list or arguments[-1] is Ellipsis:
        kinds = [arguments[0]] * len(value)
    elif len(arguments) != len(value):
        raise _wrong(key, f"a list of {len(arguments)} values", value)
    else:
        kinds = list(arguments)
    return origin(convert(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _convert_choice(hint: Any, value: Any, key: str) -> Any:
    choices = {c: c for c in get_args(hint)} if get_origin(hint) is Literal else {member.value: member for member in hint}
    if value not in choices:
        raise ConfigError(f"{key}: expected one of {list(choices)}, got {value!r}{nearest(str(value), map(str, choices))}")
    return choices[value]


def _union_members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()


def _only_member(members: tuple[Any, ...], key: str) -> Any:
    real = [member for member in members if member is not type(None)]
    if len(real) != 1:
        raise TypeError(f"{key}: a schema field has one type, optionally `| None`; got {members}")
    return real[0]


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _wrong(key: str, expected: str, value: Any, advice: str = "") -> ConfigError:
    got = "nothing (null)" if value is None else f"{value!r} ({type(value).__name__})"
    return ConfigError(f"{key}: expected {expected}, got {got}" + (f"; {advice}" if advice else ""))
