"""HTML in small pieces: sections, tables, figures, videos; everything escaped, one style, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EMBED_LIMIT = 8_000_000
"""Bytes of one video up to which it is embedded; a larger one is linked, and the report then needs the folder beside it."""

VIDEO_TYPES = {".mp4": "video/mp4", ".webm": "video/webm"}
IMAGE_TYPES = {".gif": "image/gif", ".png": "image/png"}

_STYLE = """
:root { color-scheme: light; --ink: #1d2429; --soft: #5b6770; --line: #dfe4e8; --paper: #fff; --wash: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 8px 0 2px; } h2 { font-size: 19px; margin: 0 0 10px; } h3 { font-size: 15px; margin: 14px 0 4px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 16px 0; }
p { margin: 6px 0; } .soft { color: var(--soft); }
.absent { color: #8a5a00; background: #fff6e0; padding: 6px 10px; border-radius: 6px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 16px 0; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 26px; font-weight: 600; } .card span { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: 13px; }
img, video { width: 100%; height: auto; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; font-size: 13px; }
.videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 14px; }
code { background: var(--wash); padding: 1px 4px; border-radius: 4px; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A titled block; empty parts are dropped."""
    return f"<section><h2>{escape(title)}</h2>{''.join(part for part in parts if part)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def absent(what: str, where: str) -> str:
    """Say what is missing and which file would hold it, in place of hiding it."""
    return paragraph(f"Not there: {what} ({where}).", "absent")


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Big numbers: (name, value, small print)."""
    cells = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for name, value, note in items
    )
    return f'<div class="cards">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are formatted by `number`."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(number(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def figure(svg: str, caption: str) -> str:
    """An SVG drawing with its caption. As an image, so that ids of several drawings cannot clash."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def grid(*figures: str) -> str:
    """Figures side by side where there is room."""
    return f'<div class="grid">{"".join(figures)}</div>'


def moving_picture(path: Path, base: Path) -> str:
    """A video or picture file, embedded when small, with its name as caption."""
    kind = VIDEO_TYPES.get(path.suffix) or IMAGE_TYPES[path.suffix]
    if path.stat().st_size <= EMBED_LIMIT:
        source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    else:
        source = path.relative_to(base).as_posix()
    caption = escape(path.stem.replace("_", " "))
    if path.suffix in VIDEO_TYPES:
        shown = f'<video controls loop muted playsinline preload="metadata" src="{source}"></video>'
    else:
        shown = f'<img alt="{caption}" src="{source}">'
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def number(value: Any, digits: int = 3) -> str:
    """Text for a table: integers with thousands, floats with `digits` significant decimals, a dash for no number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{int(value):,}" if value.is_integer() and abs(value) >= 1000 else f"{value:.{digits}f}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(number(item, digits) for item in value) + "]"
    return str(value)


def escape(text: str) -> str:
    """Text that may stand anywhere in HTML."""
    return html.escape(text, quote=True)
