"""What all console commands share: `key=value` words in, help from the dataclasses, one sentence on bad input."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from wmrl.config import load_config
from wmrl.config_types import nested_schema, required_fields

BAD_INPUT = 2
"""Exit status for settings that cannot be used; 1 stays for crashes."""


def run_command[T](
    work: Callable[[T], int | None],
    name: str,
    schema: type[T],
    arguments: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
) -> int:
    """Compose `<name>.yaml` of `folder` (default: `configs`) with the command line, run `work(config)`, return the exit status.

    A ValueError is the user's (wrong setting, broken file): it is printed as one sentence; `--traceback` shows where it arose.
    Every other exception is ours and passes through.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(help_text(name, schema))
        return 0
    show_traceback = "--traceback" in words
    overrides = [word for word in words if word != "--traceback"]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        return work(load_config(name, overrides, schema, folder=folder)) or 0
    except ValueError as error:
        if show_traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def help_text(name: str, schema: type) -> str:
    """Usage and every key with type, default and the docstring below the field."""
    lines = [f"usage: {name} [key=value ...] [group=choice ...] [--traceback]", "", *_key_lines(schema, "")]
    return "\n".join(lines)


def _key_lines(schema: type, prefix: str) -> list[str]:
    hints, missing, documents = get_type_hints(schema), required_fields(schema), _field_documents(schema)
    lines = []
    for field in dataclasses.fields(schema):
        nested = nested_schema(hints[field.name])
        document = documents.get(field.name, "")
        if nested is not None:
            summary = document or (inspect.getdoc(nested) or "").splitlines()[0]
            lines += ["", f"{prefix}{field.name}: {summary}", *_key_lines(nested, f"{prefix}{field.name}.")]
            continue
        default = "required" if field.name in missing else f"{_default(field)!r}"
        lines.append(f"  {prefix}{field.name} ({_type_name(hints[field.name])}, {default}) {document}".rstrip())
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else str(hint).replace("typing.", "")


def _field_documents(schema: type) -> dict[str, str]:
    """The string literal below each field, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(body, ast.ClassDef)
    documents = {}
    for field, below in zip(body.body, body.body[1:]):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            documents[field.target.id] = " ".join(ast.literal_eval(below.value).split())  # type: ignore[attr-defined]
    return documents
