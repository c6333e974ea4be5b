"""A table written by Plimsoll: one safetensors file with vectors and words, memory-mapped.

``plimsoll embeddings subset`` and ``convert`` write it with ``-o x.safetensors``, and subsets are cached in it; see
`plimsoll.embeddings.table`. Only rows with a vector from the original file are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np

from plimsoll.embeddings.formats import Block, rows_of
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.table import Table, is_table, open_table
from plimsoll.embeddings.wanted import MISSING

TITLE = "Plimsoll table (.safetensors)"
_PART_WORDS = 1 << 16


def recognises(head: bytes, source: Source) -> bool:
    """Return whether a file begins with the header of a table; see `Format`."""
    return is_table(head)


def open_vectors(source: Source) -> TableVectors:
    """Map a table. A compressed table is first unpacked to a temporary file. See `Format`."""
    return TableVectors(source)


class TableVectors:
    """The vectors of a table; see `Vectors`."""

    num_promised = None
    num_parts = 0
    counted = "word"
    first_number = 1

    def __init__(self, source: Source) -> None:
        self._unpacking = ExitStack()
        self._table = open_table(self._unpacking.enter_context(source.as_file()))
        weakref.finalize(self, self._unpacking.close)
        self._share = 0.0

    @property
    def dimension(self) -> int:
        """The number of values per vector."""
        return int(self._table.vectors.shape[1])

    def share_read(self) -> float:
        """Return the share of the table that the parts yielded so far cover; see `Vectors`."""
        return self._share

    def build(self, words: list[bytes]) -> None:
        """Return ``None``: a table cannot build vectors of other words."""

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield functions that read one part of the table each; see `Vectors`."""
        words = self._table.raw_words()
        for begin in range(0, len(words), _PART_WORDS):
            self._share = min((begin + _PART_WORDS) / len(words), 1.0)
            yield partial(_block, self._table, words[begin : begin + _PART_WORDS], begin, wanted)


def _block(table: Table, words: list[bytes], begin: int, wanted: Collection[bytes] | None) -> Block:
    is_vector = table.found[begin : begin + len(words)] < MISSING
    is_kept = is_vector if wanted is None else is_vector & np.array([word in wanted for word in words], np.bool_)
    places = np.flatnonzero(is_kept)
    return Block(
        [words[place] for place in places.tolist()],
        places,
        len(words),
        lambda indexes: rows_of(table.vectors[begin + places[indexes]]),
    )
