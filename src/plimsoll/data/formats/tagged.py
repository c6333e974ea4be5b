"""The store into which `plimsoll.data.text.sentences` puts words with tags, of any format: a text is a sentence.

It is that of `plimsoll.data.formats.packed`, in which each text has a line for every word: the word, a tab, its tag. As
a text, which is what tokenizers are trained on, the words come with spaces between them and without their tags;
`words_and_tags` gives both back. NOT a format for anything but the cache of this version.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Found, Layout, Part, Reading, packed

NO_TAG = "-100"  # of a word that is neither learned nor judged, as torch's losses and Hugging Face data sets have it
KEPT = "tags"  # the label of a layout that is to give texts with their tags
_TAG_AND_END = re.compile(rb"\t[^\n]*\n")


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout of a store."""
    return Layout("tagged"), 0


def scan(part: Part) -> Found:
    """Return the texts that begin in a part."""
    return packed.scan(part)


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return the words of some spans with spaces between them; with ``layout.label`` as they are stored."""
    if layout.label == KEPT:
        return [raw.decode("utf-8") for raw in raws]
    return [_words(raw).decode("utf-8") for raw in raws]


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from the bytes of all their spans."""
    return decode([raw[begin:end] for begin, end in pairwise(borders.tolist())], layout)


def stored_text(words: list[str], tags: list[str]) -> str:
    """Return a sentence as it is stored."""
    return "\n".join(map("\t".join, zip(words, tags, strict=True)))


def words_and_tags(text: str) -> tuple[list[str], list[str]]:
    """Return what `stored_text` was made of."""
    cells = text.replace("\n", "\t").split("\t")
    return cells[::2], cells[1::2]


def _words(raw: bytes) -> bytes:
    words = _TAG_AND_END.sub(b" ", raw)
    return words[: words.rindex(b"\t")]  # the tag of the last word
