"""Blocks: each is read once, memory is bounded, and what is too long is read by itself."""

import sys
from pathlib import Path

import numpy as np
import pytest

from corpora import opened, written
from plimsoll.data.blocks import Blocks
from plimsoll.data.corpus import Corpus


class Watched:
    """A corpus that counts what is read."""

    def __init__(self, corpus: Corpus, texts_per_block: int) -> None:
        self._corpus, self.texts_per_block = corpus, texts_per_block
        self.read: list[tuple[int, int]] = []
        self.announced: list[tuple[int, int]] = []
        self.byte_lengths = corpus.byte_lengths

    def __len__(self) -> int:
        return len(self._corpus)

    def read_range(self, first: int, last: int) -> list[str]:
        self.read.append((first, last))
        return self._corpus.read_range(first, last)

    def announce(self, first: int, last: int) -> None:
        self.announced.append((first, last))
        self._corpus.announce(first, last)


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
            assert blocks.texts(batch) == [lines[number] for number in batch]
            seen += batch.tolist()
    assert sorted(seen) == list(range(1003))
    assert (
        sorted(watched.read)
        == sorted(watched.announced)
        == [(first, min(first + 100, 1003)) for first in range(0, 1003, 100)]
    )


def test_the_blocks_used_last_are_kept_within_the_bytes_given(watched: Watched, lines: list[str]):
    block_bytes = sum(map(sys.getsizeof, lines[100:200])) + 800
    blocks = Blocks(watched, block_bytes * 3)
    for number in (0, 1, 2, 0, 3, 0):
        blocks.texts(np.array([number * 100]))
    assert [first // 100 for first, _ in watched.read] == [0, 1, 2, 3]
    blocks.texts(np.array([100]))  # the one that was used least has gone
    assert [first // 100 for first, _ in watched.read] == [0, 1, 2, 3, 1]


def test_blocks_that_would_not_fit_are_not_read_whole(watched: Watched, lines: list[str]):
    blocks = Blocks(watched, 1000)
    assert blocks.texts(np.array([3, 901, 4])) == [lines[3], lines[901], lines[4]]
    assert watched.read == [(3, 4), (901, 902), (4, 5)]
