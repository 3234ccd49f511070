"""Each command of the README runs, in its smallest size.

The comment right before a fenced `bash` block says how:

    <!-- run -->                     the block as it is
    <!-- run: make smoke -->         this command instead (the same thing in its smallest size)
    <!-- no-run: why -->             not run, with the reason; every console command in it must exist all the same

A `bash` block without such a comment fails, so that nothing is skipped silently. `python` blocks run as they are.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"(?:<!--\s*(?P<note>(?:no-)?run(?::.*?)?)\s*-->\s*\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)
BUILT_IN = {"cd", "export", "git", "make", "python", "source", "xdg-open", "open"}


@dataclass(frozen=True)
class Block:
    """A fenced block. note is the comment before it ("" when there is none)."""

    line: int
    language: str
    note: str
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced bash and python blocks of a Markdown text."""
    found = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("language")].count("\n") + 1
        found.append(Block(line, match["language"], (match["note"] or "").strip(), match["code"]))
    return [block for block in found if block.language in ("bash", "sh", "python")]


def command_of(block: Block) -> str | None:
    """What to run for a block, None for `no-run`. Raises AssertionError when the README does not say."""
    if block.language == "python":
        return None if block.note.startswith("no-run:") else block.code
    assert block.note, f"README line {block.line}: say <!-- run -->, <!-- run: smaller command --> or <!-- no-run: why -->"
    if block.note.startswith("no-run"):
        assert block.note.removeprefix("no-run").strip(": "), f"README line {block.line}: no-run needs a reason"
        return None
    return block.note.removeprefix("run").removeprefix(":").strip() or block.code


def programs(code: str) -> set[str]:
    """The first word of every command line of a bash block."""
    lines = [line.split("#")[0].strip() for line in code.replace("\\\n", " ").splitlines()]
    return {shlex.split(line)[0] for line in lines if line}


README_BLOCKS = blocks(README.read_text())


@pytest.mark.parametrize("block", README_BLOCKS, ids=lambda block: f"line-{block.line}")
def test_every_program_of_the_readme_exists(block):
    if block.language == "python":
        compile(block.code, "README.md", "exec")
        return
    command_of(block)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for program in programs(block.code):
        known = program in scripts or program in BUILT_IN or program.startswith((".ci/", "scripts/", ".venv/bin/"))
        assert known or shutil.which(program), f"README line {block.line}: {program} does not exist"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"^\s*make ([a-z-]+)", block.code, re.M):
        assert target in targets, f"README line {block.line}: make {target} does not exist"


def runnable() -> list[Any]:
    """(block, command) for every block that is to run; a whole training run, even a small one, is a slow test."""
    cases = []
    for block in README_BLOCKS:
        command = command_of(block) if block.language == "python" or block.note else None
        if command:
            marks = [pytest.mark.slow] if re.search(r"\bmake\b|smoke", command) else []
            cases.append(pytest.param(block, command, id=f"line-{block.line}", marks=marks))
    return cases


@pytest.mark.parametrize(("block", "command"), runnable())
def test_every_command_of_the_readme_runs(block, command):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = [sys.executable, "-c", command] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"README line {block.line}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


SAMPLE = """
<!-- run: make smoke -->
```bash
make train
```

<!-- no-run: takes an hour -->
```bash
wmrl-train train.steps=100 \\
    seed=1   # a comment
```

```python
print(1)
```

```text
not a command
```
"""


def test_notes_choose_the_smallest_size():
    found = blocks(SAMPLE)
    assert [block.language for block in found] == ["bash", "bash", "python"]
    assert [command_of(block) for block in found] == ["make smoke", None, "print(1)\n"]
    assert programs(found[1].code) == {"wmrl-train"}


def test_a_block_without_a_note_is_not_skipped_silently():
    with pytest.raises(AssertionError, match="line 2: say"):
        command_of(blocks("\n```bash\nmake train\n```\n")[0])


def test_no_run_needs_a_reason():
    with pytest.raises(AssertionError, match="needs a reason"):
        command_of(blocks("<!-- no-run: -->\n```bash\nmake train\n```\n")[0])
