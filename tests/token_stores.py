"""Token stores for tests: texts as lists of numbers, as `plimsoll.data.tokens.store.tokenize` stores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.tokens.store import TokenStore, open_tokens
from plimsoll.files.store import stored

END = 0


def store_of(folder: Path, texts: list[list[int]], marks: NDArray[np.uint8] | None = None) -> TokenStore:
    """Store texts with the end token 0; ``marks`` tell which unit begins at each token."""

    def write(place: Path) -> dict[str, object]:
        np.array([token for text in texts for token in [*text, END]], np.uint16).tofile(place / "tokens.bin")
        (np.cumsum([len(text) + 1 for text in texts]) - 1).astype(np.int64).tofile(place / "ends.bin")
        if marks is not None:
            marks.tofile(place / "marks.bin")
        return {"dtype": "uint16", "has_marks": marks is not None}

    stored(folder / "tokens", write)
    return open_tokens(folder / "tokens")


def store_of_lengths(folder: Path, lengths: list[int], vocab_size: int = 50) -> TokenStore:
    """Store texts of these lengths, with random tokens from 1 to ``vocab_size - 1``."""
    tokens = np.random.default_rng(0).integers(1, vocab_size, sum(lengths)).tolist()
    ends = np.cumsum(lengths).tolist()
    return store_of(folder, [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)])
