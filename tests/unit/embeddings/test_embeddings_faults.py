"""Faults of a file of word vectors: counted, with examples that name their place, or raised as an error."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.faults import FaultList
from plimsoll.embeddings.formats import Block, Fault, Rows
from plimsoll.embeddings.opening import Opened, open_file
from plimsoll.errors import EmbeddingError
from plimsoll.records.embeddings import FaultCount


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    (tmp_path / "x").write_bytes(b"10 2\nthe 1 2\n")
    return open_file(tmp_path / "x")


def add(faults: FaultList, block_faults: list[Fault], row_faults: list[Fault]) -> None:
    """Add a part of 8 words, of which "b" and "f" were parsed."""
    block = Block(
        [b"b", b"c", b"\xff"], np.array([1, 2, 5]), 8, lambda indexes: pytest.fail("not asked"), tuple(block_faults)
    )
    faults.add(block, np.array([0, 2]), Rows(np.zeros((2, 2), np.float32), tuple(row_faults)))


def test_faults_are_counted_by_kind_and_say_their_line(opened: Opened):
    faults = FaultList(opened, strict=False)
    add(faults, [Fault("dimension", 7, "'g'")], [Fault("number", 1, "'x' is not a number"), Fault("finite", 0, "nan")])
    add(faults, [Fault("dimension", 0, "'a'")], [])
    assert faults.num_entries == 16
    assert faults.counts() == (
        FaultCount(kind="NaN or infinite", count=1, examples=("line 3: 'b': nan",)),
        FaultCount(kind="not a number", count=1, examples=("line 7: '\ufffd': 'x' is not a number",)),
        FaultCount(kind="wrong dimension", count=2, examples=("line 9: 'g'", "line 10: 'a'")),
    )


def test_formats_that_are_no_text_count_words(opened: Opened):
    opened.vectors.counted = "word"
    faults = FaultList(opened, strict=False)
    faults.num_entries = 1_000_000
    add(faults, [Fault("utf-8", 3, "it")], [])
    assert faults.counts()[0].examples == (f"word {1_000_000 + opened.vectors.first_number + 3:,}: it",)


def test_a_few_examples_are_kept(opened: Opened):
    faults = FaultList(opened, strict=False)
    for _ in range(9):
        add(faults, [Fault("dimension", 0, "short")], [])
    (count,) = faults.counts()
    assert (count.count, len(count.examples), count.examples[-1]) == (9, 5, "line 34: short")


def test_strict_the_first_fault_is_an_error_that_says_where(opened: Opened):
    faults = FaultList(opened, strict=True)
    add(faults, [], [])
    message = r"x: line 10: 'a', 1 numbers, not 2 \(wrong dimension\): correct the file, or leave out --strict to skip"
    with pytest.raises(EmbeddingError, match=message):
        add(faults, [Fault("dimension", 0, "'a', 1 numbers, not 2")], [Fault("finite", 0, "nan")])


def test_words_that_are_promised_and_not_there_are_one_fault(opened: Opened):
    faults = FaultList(opened, strict=False)
    add(faults, [], [])
    faults.end()
    assert faults.counts() == (
        FaultCount(kind="cut off", count=1, examples=("8 of the 10 words that the header states",)),
    )
    strict = FaultList(opened, strict=True)
    with pytest.raises(EmbeddingError, match="0 of the 10 words that the header states"):
        strict.end()


def test_what_is_cut_off_already_or_has_all_words_is_not_said_again(opened: Opened):
    faults = FaultList(opened, strict=False)
    add(faults, [Fault("truncated", 7, "'g'")], [])
    faults.end()
    assert [fault.count for fault in faults.counts()] == [1]
    enough = FaultList(opened, strict=True)
    enough.num_entries = opened.vectors.num_promised
    enough.end()
    assert enough.counts() == ()


def test_more_words_than_a_header_promises_are_a_fault_of_the_header(opened: Opened):
    faults = FaultList(opened, strict=False)
    faults.num_entries = opened.vectors.num_promised + 6
    faults.end()
    assert faults.counts() == (
        FaultCount(kind="wrong header", count=1, examples=("it states 10 words, but the file has 16",)),
    )


def test_words_that_come_again_are_counted_or_an_error(opened: Opened):
    faults = FaultList(opened, strict=False)
    faults.add_again([b"a", b"b"])
    assert (faults.num_duplicates, faults.counts()) == (2, ())
    with pytest.raises(EmbeddingError, match="'a' occurs more than once: remove all but one, or leave out --strict"):
        FaultList(opened, strict=True).add_again([b"a"])
