"""The main job, `make train`: collect, imitate, world model, WMRL, evaluation and report, one after the other (`wmrl-demo`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from vla import collect, evaluate, report, sft, train, world_model
from vla.session import Session, run_in_session
from wmrl.progress import duration, note

STAGES = (collect, sft, world_model, train, evaluate, report)


def run(session: Session) -> None:
    """All stages; each leaves out what its folder already holds."""
    began = time.monotonic()
    for module in STAGES:
        module.run(session)
    note(f"{session.run.path}: done after {duration(time.monotonic() - began)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
