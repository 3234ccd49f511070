"""What the report reads: the contract files of a run folder, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wmrl.files import read_json, read_json_lines
from wmrl.report_html import IMAGE_TYPES, VIDEO_TYPES

Record = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """The contract files of a run; {} or [] for those that are not there."""

    folder: Path
    environment: Record
    metrics: list[Record]
    ledger: Record
    summary: Record
    evaluations: dict[str, list[Record]]
    videos: list[Path]

    def series(self, name: str) -> list[float | None]:
        """One metric over the steps, None where it was not logged."""
        return [record.get(name) for record in self.metrics]


def read_run(folder: Path) -> RunData:
    """Read all contract files that are there."""

    def json_or_empty(name: str) -> Record:
        return read_json(folder / name) if (folder / name).exists() else {}

    evaluations = {path.parent.name: read_json_lines(path) for path in sorted(folder.glob("eval/*/episodes.jsonl"))}
    kinds = VIDEO_TYPES | IMAGE_TYPES
    return RunData(
        folder=folder,
        environment=json_or_empty("env.json"),
        metrics=read_json_lines(folder / "metrics.jsonl"),
        ledger=json_or_empty("ledger.json"),
        summary=json_or_empty("summary.json"),
        evaluations=evaluations,
        videos=sorted(path for path in folder.glob("videos/**/*") if path.suffix in kinds),
    )
