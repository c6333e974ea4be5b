"""Blocks of texts: each block is read once, memory is bounded, and a text larger than a block is read separately."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from corpora import opened, written
from plimsoll.data.batches.order import BlockShuffle, drawn
from plimsoll.data.text.blocks import Blocks
from plimsoll.data.text.corpus import Corpus


class Watched:
    """A corpus that records which blocks are read."""

    def __init__(self, corpus: Corpus, texts_per_block: int) -> None:
        self._corpus, self.texts_per_block = corpus, texts_per_block
        self.read: list[tuple[int, int]] = []
        self.announced: list[tuple[int, int]] = []
        self.byte_lengths, self.spans = corpus.byte_lengths, corpus._spans

    def __len__(self) -> int:
        return len(self._corpus)

    def raw_runs(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        self.read.append((first, last))
        return self._corpus.raw_runs(first, last)

    def announce(self, first: int, last: int) -> None:
        self.announced.append((first, last))
        self._corpus.announce(first, last)


def texts_of(blocks: Blocks, watched: Watched, ids: Sequence[int] | np.ndarray) -> list[str]:
    numbers = np.asarray(ids, np.int64)
    begins, ends, _ = watched.spans(numbers)
    return [raw.decode().rstrip("\n") for raw in blocks.raws(numbers, begins, ends)]


@pytest.fixture
def lines() -> list[str]:
    return [f"line {number}" for number in range(1003)]


@pytest.fixture
def watched(tmp_path: Path, lines: list[str]) -> Watched:
    return Watched(opened(written(tmp_path / "a.txt", "\n".join(lines))), 100)


def test_an_order_shuffled_in_blocks_reads_each_block_once(watched: Watched, lines: list[str]):
    blocks = Blocks(watched, 1 << 20)
    generator = np.random.default_rng(0)
    seen = []
    for pool in np.split(generator.permutation(11), [4, 8]):
        ids = np.concatenate([np.arange(block * 100, min(block * 100 + 100, 1003)) for block in pool])
        generator.shuffle(ids)
        for batch in np.array_split(ids, 5):
            assert texts_of(blocks, watched, batch) == [lines[number] for number in batch]
            seen += batch.tolist()
    assert sorted(seen) == list(range(1003))
    assert (
        sorted(watched.read)
        == sorted(watched.announced)
        == [(first, min(first + 100, 1003)) for first in range(0, 1003, 100)]
    )


def test_the_blocks_used_last_are_kept_within_the_bytes_given(watched: Watched, lines: list[str]):
    block_bytes = sum(len(line) + 1 for line in lines[100:200])
    blocks = Blocks(watched, block_bytes * 3)
    for number in (0, 1, 2, 0, 3, 0):
        texts_of(blocks, watched, [number * 100])
    assert [first // 100 for first, _ in watched.read] == [0, 1, 2, 3]
    texts_of(blocks, watched, [100])  # the least recently used block was evicted
    assert [first // 100 for first, _ in watched.read] == [0, 1, 2, 3, 1]


def test_blocks_that_would_not_fit_are_not_read_whole(watched: Watched, lines: list[str]):
    blocks = Blocks(watched, 1000)
    assert texts_of(blocks, watched, [3, 901, 4]) == [lines[3], lines[901], lines[4]]
    assert watched.read == [(3, 4), (901, 902), (4, 5)]


@pytest.mark.long
def test_texts_of_a_pool_are_read_once_however_short_they_are_as_strings(tmp_path: Path):
    """The texts of a pool are read once even if they are short.

    A pool of the default order is 16 MiB of files; as strings, texts this short take five times as much.
    """
    lines = [f"{number % 10}\U0001f600" for number in range(1_500_000)]
    corpus = opened(written(tmp_path / "a.txt", "\n".join(lines))).with_blocks()
    order = drawn(len(corpus), 3, BlockShuffle(corpus.texts_per_block))
    num_read = 0
    pread = os.pread

    def counted(descriptor: int, num_bytes: int, place: int) -> bytes:
        nonlocal num_read
        num_read += num_bytes
        return pread(descriptor, num_bytes, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counted)
        for start in range(0, len(corpus), 1 << 16):
            ids = order.ids(0, start, min(start + (1 << 16), len(corpus)))
            assert corpus.texts(ids) == [lines[number] for number in ids]
    assert num_read <= corpus.num_bytes
