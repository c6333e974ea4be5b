"""Shared code of the formats: parsing of binary records, selection of wanted words, and UTF-8 checks.

A record is a word, a byte that ends it, and a fixed number of further bytes. A word longer than `MAX_WORD_BYTES` means
that the file is damaged.
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
"""More numbers than any word vector has: a header with a larger dimension is damaged."""


class Records:
    """A parser of records: a word, the byte ``end``, and ``tail_bytes`` further bytes.

    Attributes:
        fixed_bytes: the number of bytes of a record without its word.
    """

    def __init__(self, end: bytes, tail_bytes: int) -> None:
        self._end = end[0]
        self.fixed_bytes = 1 + tail_bytes
        # An incomplete record at the end is matched as a whole (``.+``), so that no record is searched inside it.
        self._pattern = re.compile(b"([^%b]*+)%b.{%d}|.+" % (end, end, tail_bytes), re.DOTALL)

    def split(self, raw: bytes) -> tuple[list[bytes], NDArray[np.int64]]:
        """Return the words of the complete records at the start of ``raw``, and the offset of each record's end."""
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
    """Yield the file in parts of complete records.

    Each part has its bytes, its words, the offset of each record's end, and the share of the file read so far (0 to 1).
    Iteration ends after ``num_words`` words, at the end of the file, or when a word is too long.

    Args:
        source: the file.
        records: the parser.
        begin: the offset of the first record.
        num_words: the maximum number of words.
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
    """Make a `Block` from the words of a part of a file.

    Args:
        words: all words of the part.
        wanted: the words whose vectors are needed, with fast membership tests, such as a set; ``None``: all words.
        rows_at: function that returns the vectors of words, given their positions in the part.
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
    """Make a `Block` without words, whose only fault is that the file ends early.

    ``at`` is the position, in the part, of the word at which the file ends. ``what`` describes the fault.
    """
    return Block(
        [], np.empty(0, np.int64), 0, lambda _: rows_of(np.empty((0, 0), np.float32)), (Fault("truncated", at, what),)
    )


def as_set(wanted: Collection[bytes] | None) -> Collection[bytes] | None:
    """Return the wanted words in a form with fast membership tests."""
    return wanted if wanted is None or isinstance(wanted, Set | dict) else frozenset(wanted)


def not_utf8(words: list[bytes]) -> list[int]:
    """Return the indexes of the words that are not UTF-8."""
    try:
        b" ".join(words).decode("utf-8")
    except UnicodeDecodeError:
        return [place for place, word in enumerate(words) if not is_utf8(word)]
    return []
