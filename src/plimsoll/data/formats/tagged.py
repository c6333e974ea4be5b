"""The store for sentences of tagged words, written by `plimsoll.data.text.sentences` from any format.

It is a store of the format `plimsoll.data.formats.packed` whose texts have one line per word: the word, a tab, its tag.
Tokenizers are trained on the words joined by spaces, without tags. `words_and_tags` returns the words with their tags.
Not an interchange format: only the cache of this version reads it.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Found, Layout, Part, Reading, packed

NO_TAG = "-100"  # marks words that losses of torch ignore, as in Hugging Face data sets
KEPT = "tags"  # the label of a layout whose texts are returned with their tags
_TAG_AND_END = re.compile(rb"\t[^\n]*\n")


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout of a store, and 0: the first text begins at the first byte of the texts file."""
    return Layout("tagged"), 0


def scan(part: Part) -> Found:
    """Find the texts that begin in a part; see `plimsoll.data.formats.Format`."""
    return packed.scan(part)


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return the words of each text joined by spaces, or the stored text with tags if ``layout.label`` is `KEPT`."""
    if layout.label == KEPT:
        return [raw.decode("utf-8") for raw in raws]
    return [_words(raw).decode("utf-8") for raw in raws]


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from one bytes object; see `plimsoll.data.formats.Format`."""
    return decode([raw[begin:end] for begin, end in pairwise(borders.tolist())], layout)


def stored_text(words: list[str], tags: list[str]) -> str:
    """Return the stored form of a sentence."""
    return "\n".join(map("\t".join, zip(words, tags, strict=True)))


def words_and_tags(text: str) -> tuple[list[str], list[str]]:
    """Return the words and tags of a text that `stored_text` wrote."""
    cells = text.replace("\n", "\t").split("\t")
    return cells[::2], cells[1::2]


def _words(raw: bytes) -> bytes:
    words = _TAG_AND_END.sub(b" ", raw)
    return words[: words.rindex(b"\t")]  # the tag of the last word
