"""Blocks of consecutive texts in bounded memory, for orders that are shuffled in blocks.

A fully shuffled order over a file larger than memory reads a page of 4 KiB for every text, or more with read-ahead.
With an order that takes its texts from a few blocks at a time, each block is read once, contiguously. The operating
system is told about all blocks of a batch before the first block is read. Such orders come from
`plimsoll.data.batches.order.BlockOrder`. With any other order, a block is read for every text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Runs = tuple[list[int], list[bytes]]  # offsets of stretches in all files laid end to end, and their bytes


class Readable(Protocol):
    """The interface of a corpus from which blocks are read."""

    @property
    def texts_per_block(self) -> int:
        """The number of consecutive texts in a block."""
        ...

    def __len__(self) -> int: ...

    def byte_lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of texts in their files, in bytes."""
        ...

    def raw_runs(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield runs of consecutive texts: the offset of each run in all files laid end to end, and its bytes."""
        ...

    def announce(self, first: int, last: int) -> None:
        """Tell the operating system that consecutive texts will be read soon."""
        ...


class Blocks:
    """A cache of the most recently used blocks, of at most ``cache_bytes`` bytes in all."""

    def __init__(self, corpus: Readable, cache_bytes: int) -> None:
        self._corpus, self.cache_bytes = corpus, cache_bytes
        self._per_block = corpus.texts_per_block
        self._kept: OrderedDict[int, Runs] = OrderedDict()
        self._kept_bytes = 0

    def raws(self, ids: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[bytes]:
        """Return the bytes of texts, given their indices and their spans in all files laid end to end."""
        numbers = ids // self._per_block
        for number in np.unique(numbers).tolist():
            if number in self._kept:
                self._kept.move_to_end(number)
            else:
                self._corpus.announce(*self._range(number))
        raws = []
        for text, number, begin, end in zip(
            ids.tolist(), numbers.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            places, stretches = self._kept.get(number) or self._read(number, text)
            run = bisect_right(places, begin) - 1 if len(places) > 1 else 0
            raws.append(stretches[run][begin - places[run] : end - places[run]])
        return raws

    def _range(self, number: int) -> tuple[int, int]:
        return number * self._per_block, min((number + 1) * self._per_block, len(self._corpus))

    def _read(self, number: int, text: int) -> Runs:
        """Return the bytes of a block, and cache them.

        If the block is too large to cache, return only the bytes of ``text``.
        """
        first, last = self._range(number)
        if self._corpus.byte_lengths(np.arange(first, last)).sum() > self.cache_bytes // 2:
            return _listed(self._corpus.raw_runs(text, text + 1))
        runs = self._kept[number] = _listed(self._corpus.raw_runs(first, last))
        self._kept_bytes += _num_bytes(runs)
        while self._kept_bytes > self.cache_bytes and len(self._kept) > 1:
            self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return runs


def _listed(runs: Iterator[tuple[int, bytes]]) -> Runs:
    places, stretches = zip(*runs, strict=True)
    return list(places), list(stretches)


def _num_bytes(runs: Runs) -> int:
    return sum(map(len, runs[1]))
