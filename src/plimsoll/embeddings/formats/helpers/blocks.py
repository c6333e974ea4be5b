"""What the formats that are not text share: records that end after so many bytes, words that matter, finite numbers.

A record is a word, the byte that ends it, and a known number of bytes. A word longer than `MAX_WORD_BYTES` is no word:
what is read there is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Set

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats.helpers.scanning import is_utf8
from plimsoll.embeddings.formats import Block, Fault, Rows, rows_of
from plimsoll.embeddings.formats.helpers.sources import Source

MAX_WORD_BYTES = 64 << 10
MAX_DIMENSION = 1 << 20
"""More numbers than any word vector has: a header that says more is damaged."""


class Records:
    """Takes records apart: words that end with one byte, and ``tail_bytes`` behind it.

    Attributes:
        fixed_bytes: what a record has besides the word.
    """

    def __init__(self, end: bytes, tail_bytes: int) -> None:
        self._end = end[0]
        self.fixed_bytes = 1 + tail_bytes
        # What is left behind the last whole record is one match of its own, so that nothing is searched in it.
        self._pattern = re.compile(b"([^%b]*+)%b.{%d}|.+" % (end, end, tail_bytes), re.DOTALL)

    def split(self, raw: bytes) -> tuple[list[bytes], NDArray[np.int64]]:
        """Return the words of the whole records at the begin of ``raw``, and where each record ends."""
        words = self._pattern.findall(raw)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        ends = np.cumsum(lengths + self.fixed_bytes)
        if words and not words[-1]:
            begin = int(ends[-1]) - self.fixed_bytes
            if len(raw) - begin < self.fixed_bytes or raw[begin] != self._end:
                return words[:-1], ends[:-1]
        return words, ends


def cut_at_records(
    source: Source, records: Records, begin: int, num_words: int
) -> Iterator[tuple[bytes, list[bytes], NDArray[np.int64], float]]:
    """Yield whole records with their words, where each ends, and how much of the file has been read by then.

    It stops after ``num_words``, where the file ends, or where a word is too long to be one.

    Args:
        begin: where the first record begins.
    """
    rest, num_left = b"", num_words
    for chunk, share in source.chunks(max(1 << 20, 4 * records.fixed_bytes)):
        raw = rest + chunk if rest else chunk
        if begin:
            raw, begin = raw[begin:], max(begin - len(raw), 0)
        words, ends = records.split(raw)
        words, ends = words[:num_left], ends[:num_left]
        if words:
            yield raw, words, ends, share
        num_left -= len(words)
        rest = raw[int(ends[-1]) :] if words else raw
        if not num_left or len(rest) > MAX_WORD_BYTES + records.fixed_bytes:
            return


def block_of(
    words: list[bytes], wanted: Collection[bytes] | None, rows_at: Callable[[NDArray[np.int64]], Rows]
) -> Block:
    """Make a block of the words of a part.

    Args:
        wanted: something that says quickly whether a word is in it, such as a set.
        rows_at: the vectors at some places of the part.
    """
    bad = not_utf8(words)
    faults = tuple(Fault("utf-8", place, repr(words[place][:80])) for place in bad)
    if wanted is not None:
        kept = [place for place, word in enumerate(words) if word in wanted]
    else:
        kept = list(range(len(words)))
    if bad:
        kept = sorted(set(kept).difference(bad))
    places = np.array(kept, np.int64)
    chosen = words if len(kept) == len(words) else [words[place] for place in kept]
    return Block(chosen, places, len(words), lambda indexes: rows_at(places[indexes]), faults)


def cut_off(at: int, what: str) -> Block:
    """Make a block without words that says that the file ends early."""
    return Block(
        [], np.empty(0, np.int64), 0, lambda _: rows_of(np.empty((0, 0), np.float32)), (Fault("truncated", at, what),)
    )


def as_set(wanted: Collection[bytes] | None) -> Collection[bytes] | None:
    """Return what says quickly whether a word is wanted."""
    return wanted if wanted is None or isinstance(wanted, Set | dict) else frozenset(wanted)


def not_utf8(words: list[bytes]) -> list[int]:
    """Return the places of words that are not UTF-8."""
    try:
        b" ".join(words).decode("utf-8")
    except UnicodeDecodeError:
        return [place for place, word in enumerate(words) if not is_utf8(word)]
    return []
