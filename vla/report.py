"""Stage 6: videos and one HTML file about the run (`wmrl-report`)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from vla.checkpoint import read_policy
from vla.evaluation import evaluation_starts
from vla.session import Session, freeze_encoder, run_in_session
from vla.videos import real_beside_imagined, real_videos
from vla.world_model import load_model
from wmrl.checkpoint import load_latest
from wmrl.progress import note, stage
from wmrl.report import write_report


def run(session: Session) -> None:
    """Record videos that are missing, then write report.html."""
    config = session.config
    with stage("report"):
        latest = load_latest(session.run.checkpoints)
        if (
            latest is not None
            and config.evaluate.videos
            and not any(session.run.videos.glob(f"final after step {latest.step} *"))
        ):
            with session.ledger.phase("videos"):
                record_videos(session)
            session.save_ledger()
        note(f"open {write_report(session.run.path)}")


def record_videos(session: Session) -> None:
    """Base and final policy on the same validation starts, and the final policy's twins where there is a world model; free, as
    the evaluation is.

    Written beside `videos` and renamed at the end, so that a killed report makes all of them again.
    """
    draft = session.run.path / ".videos"
    shutil.rmtree(draft, ignore_errors=True)
    config = session.config
    starts = evaluation_starts(config.task, "validation", min(config.evaluate.videos, config.simulator.width))
    latest = load_latest(session.run.checkpoints)
    assert latest is not None
    final = freeze_encoder(read_policy(latest.pretrained, session.device))
    real_videos(session, draft, session.base_policy(), starts, "base")
    real_videos(session, draft, final, starts, f"final after step {latest.step}")
    if config.train.correction.mode != "real":
        model = load_model(session, final)
        model.load_state_dict(latest.state["imagination"])
        real_beside_imagined(session, draft, final, model, starts)
    shutil.rmtree(session.run.videos, ignore_errors=True)
    draft.replace(session.run.videos)


def main(arguments: Sequence[str] | None = None) -> int:
    """Console command."""
    return run_in_session(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
