"""The run folder, a contract: where everything of one run lies, who may write it, and under which settings.

    config.yaml    resolved settings                  checkpoints/                see wmrl/checkpoint.py
    env.json       versions, git state, golden hash   videos/                     what the report shows
    metrics.jsonl  a line per step                    eval/<name>/episodes.jsonl  a line per episode, beside summary.json
    ledger.json    what was spent                     summary.json                the result
    tensorboard/   the same as metrics.jsonl          report.html                 see wmrl/report.py

Resuming with other settings: a key of `may_grow` (the number of steps) may grow, a key of `may_change` (what cannot alter a
result, such as the number of workers) may change; every other difference is refused by name. A key that the folder does not
know, because it is newer than the folder, had its default: a new key's default is what was done before there was a choice.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from omegaconf import OmegaConf

from wmrl.config import config_to_dict, resolved_yaml, schema_defaults
from wmrl.environment_record import describe_environment, differences
from wmrl.files import json_line, plain, read_json, read_json_lines, write_json, write_json_lines, write_text

_log = logging.getLogger(__name__)


class RunFolderError(ValueError):
    """The folder belongs to another run, or another process is using it."""


class RunFolder:
    """One run's folder, held by one process at a time; a context manager.

    path        the folder, made when missing
    config      the resolved config (a dataclass instance)
    may_grow    full keys of numbers that may be larger than in the folder's config
    may_change  full keys that may differ
    Raises RunFolderError naming the keys that differ, or the process that holds the folder.
    """

    def __init__(self, path: Path, config: Any, *, may_grow: Collection[str] = (), may_change: Collection[str] = ()) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        self._metrics: IO[str] | None = None
        self._tensorboard: Any = None
        try:
            self.is_new = not self.config_path.exists()
            self._check_config(config, may_grow, may_change)
        except BaseException:
            self._lock.close()
            raise
        write_text(self.config_path, resolved_yaml(config))

    config_path = property(lambda self: self.path / "config.yaml")
    environment_path = property(lambda self: self.path / "env.json")
    metrics_path = property(lambda self: self.path / "metrics.jsonl")
    ledger_path = property(lambda self: self.path / "ledger.json")
    summary_path = property(lambda self: self.path / "summary.json")
    report_path = property(lambda self: self.path / "report.html")
    checkpoints = property(lambda self: self.path / "checkpoints")
    videos = property(lambda self: self.path / "videos")

    def write_environment(self, golden_hash: str | None = None, *, device: str = "cpu") -> list[str]:
        """Record versions, device, git state and golden-trajectory hash in env.json; on a resume, compare with the first one.

        Returns (and logs) one sentence for each difference that can alter results; `env.json` keeps both states.
        """
        now = describe_environment(golden_hash, device)
        if not self.environment_path.exists():
            write_json(self.environment_path, now)
            return []
        first = read_json(self.environment_path)
        changed = differences(first, now)
        for sentence in changed:
            _log.warning("this run began in another environment: %s", sentence)
        if changed and now not in first.get("resumed_with", []):
            write_json(self.environment_path, {**first, "resumed_with": [*first.get("resumed_with", []), now]})
        return changed

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one step's metrics (`record["step"]` is needed, nested mappings allowed) to metrics.jsonl and TensorBoard."""
        if not isinstance(record.get("step"), int):
            raise ValueError(f"expected an integer `step` in the record, got {record.get('step')!r}")
        if self._metrics is None:
            self._open_logs(after_step=record["step"] - 1)
        assert self._metrics is not None
        self._metrics.write(json_line(record))
        self._metrics.flush()
        for name, value in _numbers(plain(record)).items():
            self._tensorboard.add_scalar(name, value, record["step"])
        self._tensorboard.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far."""
        return read_json_lines(self.metrics_path)

    def truncate_metrics(self, step: int) -> None:
        """Forget records after the checkpointed `step` (-1: all), so that no step appears twice when training resumes there."""
        self._close_logs()
        if self.metrics_path.exists():
            write_json_lines(self.metrics_path, [record for record in self.metrics() if record["step"] <= step])

    def write_ledger(self, ledger: Mapping[str, Any]) -> None:
        """Replace ledger.json."""
        write_json(self.ledger_path, ledger)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace summary.json."""
        write_json(self.summary_path, summary)

    def evaluation(self, name: str) -> Path:
        """The folder `eval/<name>`, made when missing."""
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"expected a plain name for an evaluation, got {name!r}")
        folder = self.path / "eval" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_episodes(
        self, name: str, episodes: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None = None
    ) -> None:
        """Replace eval/<name>/episodes.jsonl, and eval/<name>/summary.json when a summary is given."""
        folder = self.evaluation(name)
        write_json_lines(folder / "episodes.jsonl", episodes)
        if summary is not None:
            write_json(folder / "summary.json", summary)

    def close(self) -> None:
        """Close the logs and let other processes use the folder."""
        self._close_logs()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _check_config(self, config: Any, may_grow: Collection[str], may_change: Collection[str]) -> None:
        if self.is_new:
            foreign = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
            if foreign:
                raise RunFolderError(
                    f"expected an empty folder or a run with its config.yaml at {self.path}, got {foreign[:5]}; choose another"
                )
            return
        old = _flat(OmegaConf.to_container(OmegaConf.load(self.config_path)))
        new, defaults = _flat(config_to_dict(config)), _flat(schema_defaults(type(config)))
        refused = []
        for key in sorted(old.keys() | new.keys()):
            before, after = old.get(key, defaults.get(key, "(absent)")), new.get(key, "(absent)")
            if before == after or key in may_change or (key in may_grow and _grows(before, after)):
                continue
            refused.append(f"{key}: {before!r} there, {after!r} asked" + (" (may only grow)" if key in may_grow else ""))
        if refused:
            raise RunFolderError(
                f"{self.path} holds a run with other settings: {'; '.join(refused)}. Use the same settings, or another folder"
            )

    def _open_logs(self, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.metrics_path.exists():  # a last line cut by a kill must not merge with the next one
            write_json_lines(self.metrics_path, self.metrics())
        self._metrics = open(self.metrics_path, "a")
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=after_step + 1)

    def _close_logs(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._tensorboard.close()
        self._metrics = self._tensorboard = None


def _lock(folder: Path) -> IO[str]:
    """An open file whose lock ends with this process, however it ends."""
    file = open(folder / ".lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise RunFolderError(f"{folder} is in use by process {holder}; wait for it, stop it, or use another folder") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _grows(before: Any, after: Any) -> bool:
    return isinstance(before, int | float) and isinstance(after, int | float) and after > before


def _numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record by slashed name; texts, lists and nulls are left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = float(value)
    return found
