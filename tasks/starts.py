"""Three disjoint pools of starts per task, frozen test and validation manifests, and the check against leaks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from tasks.task import Task, get_task, require_known
from wmrl.types import Start

POOLS = {"train": range(0, 1_000_000), "validation": range(1_000_000, 1_000_400), "test": range(2_000_000, 2_001_200)}
"""Seeds of each split. Validation and test are frozen as manifests; training has no manifest, it only must stay out of them."""
FROZEN = ("validation", "test")


@dataclass(frozen=True)
class Manifest:
    """Frozen starts of one split; `content_hash` is the SHA-256 of the starts, so that an edited file is noticed."""

    task: str
    split: str
    starts: tuple[Start, ...]
    content_hash: str


def make_starts(task: str | Task, split: str, count: int, offset: int = 0) -> list[Start]:
    """`count` starts of a split from position `offset` on; goals alternate, every start is a scene of its own."""
    task = get_task(task) if isinstance(task, str) else task
    require_known("split", split, tuple(POOLS))
    pool = POOLS[split]
    if count < 0 or offset < 0 or offset + count > len(pool):
        raise ValueError(
            f"expected at most {len(pool)} starts of split {split!r}, got offset {offset} and count {count}: ask for fewer"
        )
    instructions = [text for _, text in task.goals]
    return [Start(task.name, pool[i], instructions[i % len(instructions)], split) for i in range(offset, offset + count)]


def swap_instructions(starts: Iterable[Start]) -> list[Start]:
    """The same scenes, each with the next goal of its task: a policy that reads the instruction notices."""
    swapped = []
    for start in starts:
        instructions = [text for _, text in get_task(start.task).goals]
        following = instructions[(instructions.index(start.instruction) + 1) % len(instructions)]
        swapped.append(Start(start.task, start.seed, following, start.split, start.variant, start.snapshot))
    return swapped


def load_manifest(task: str, split: str) -> Manifest:
    """Read a frozen manifest that ships with the package; ValueError when its content does not match its hash."""
    get_task(task)
    require_known("frozen split", split, FROZEN)
    name = f"{task}.{split}.json"
    content = json.loads(resources.files("tasks").joinpath("manifests", name).read_text())
    starts = tuple(Start(task, seed, instruction, split) for seed, instruction in content["starts"])
    if content["content_hash"] != content_hash(starts):
        raise ValueError(f"expected manifest {name} to match its content hash, got an edited file: restore it from git")
    return Manifest(task, split, starts, content["content_hash"])


def content_hash(starts: Sequence[Start]) -> str:
    """SHA-256 over task, seed, instruction and scene of every start, in order."""
    rows = [[s.task, s.seed, s.instruction, s.scene_hash] for s in starts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_no_leak(train_starts: Iterable[Start], manifest: Manifest) -> None:
    """ValueError when the scene of a training start is in the manifest, whatever its split label or instruction says."""
    held_out = {start.scene_hash for start in manifest.starts}
    leaked = [start for start in train_starts if start.scene_hash in held_out]
    if leaked:
        raise ValueError(
            f"expected training starts outside the {manifest.split} manifest of {manifest.task!r}, got {len(leaked)} that are "
            f"in it (first: seed {leaked[0].seed}): draw training starts with make_starts(task, 'train', ...)"
        )


def manifest_text(task: str, split: str) -> str:
    """The text of a manifest file, as frozen in the package."""
    starts = make_starts(task, split, len(POOLS[split]))
    content = {"task": task, "split": split, "content_hash": content_hash(starts)}
    rows = ",\n".join(json.dumps([s.seed, s.instruction]) for s in starts)
    return json.dumps(content, indent=0)[:-2] + f',\n"starts": [\n{rows}\n]}}\n'
