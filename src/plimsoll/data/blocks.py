"""Blocks of consecutive texts in bounded memory, for orders that are shuffled in blocks.

A shuffled order over a file that is larger than memory reads a page of 4 KiB for every text (and more, where the system
reads ahead). In an order that takes its texts from a few blocks at a time, each block is read once, in one piece, and
the system is told of all blocks of a batch before the first is read. It does NOT make such an order, and in any other
it reads a block for every text.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_LIST_ITEM_BYTES = 8


class Readable(Protocol):
    """What blocks are made of."""

    @property
    def texts_per_block(self) -> int:
        """How many consecutive texts make a block."""
        ...

    def __len__(self) -> int: ...

    def byte_lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what texts take in their files."""
        ...

    def read_range(self, first: int, last: int) -> list[str]:
        """Return consecutive texts."""
        ...

    def announce(self, first: int, last: int) -> None:
        """Say that consecutive texts will be read soon."""
        ...


class Blocks:
    """The blocks used last; ``cache_bytes`` is the memory that their texts take as Python strings."""

    def __init__(self, corpus: Readable, cache_bytes: int) -> None:
        self._corpus, self.cache_bytes = corpus, cache_bytes
        self._per_block = corpus.texts_per_block
        self._kept: OrderedDict[int, list[str]] = OrderedDict()
        self._kept_bytes = 0

    def texts(self, ids: NDArray[np.int64]) -> list[str]:
        """Return some texts by their numbers."""
        numbers, places = np.divmod(ids, self._per_block)
        for number in np.unique(numbers).tolist():
            if number in self._kept:
                self._kept.move_to_end(number)
            else:
                self._corpus.announce(*self._range(number))
        found = zip(numbers.tolist(), places.tolist(), strict=True)
        return [(self._kept.get(number) or self._read(number, place))[place] for number, place in found]

    def _range(self, number: int) -> tuple[int, int]:
        return number * self._per_block, min((number + 1) * self._per_block, len(self._corpus))

    def _read(self, number: int, place: int) -> list[str] | dict[int, str]:
        """Return the texts of a block, and keep them; of one that is too long to be kept, only that at ``place``."""
        first, last = self._range(number)
        if self._corpus.byte_lengths(np.arange(first, last)).sum() > self.cache_bytes // 2:
            return {place: self._corpus.read_range(first + place, first + place + 1)[0]}
        texts = self._corpus.read_range(first, last)
        self._kept[number] = texts
        self._kept_bytes += _text_bytes(texts)
        while self._kept_bytes > self.cache_bytes and len(self._kept) > 1:
            self._kept_bytes -= _text_bytes(self._kept.popitem(last=False)[1])
        return texts


def _text_bytes(texts: list[str]) -> int:
    return sum(map(sys.getsizeof, texts)) + _LIST_ITEM_BYTES * len(texts)
