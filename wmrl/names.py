"""The nearest valid name: what every error about an unknown key, task, mode or file ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`, did you mean X?` for the most similar candidate, or an empty string when nothing is similar.

    Candidates may be dotted keys: a similar last part in another group counts as similar (`steps` -> `trainer.steps`).
    """
    candidates = list(candidates)
    leaf = word.rsplit(".", 1)[-1]
    leaves = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(candidates)}
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not close:
        close = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    return f", did you mean {close[0]}?" if close else ""
