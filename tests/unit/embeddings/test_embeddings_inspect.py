"""Inspection of a file of word vectors, which is read completely."""

from pathlib import Path

import pytest

from plimsoll.embeddings.conversion import convert
from plimsoll.embeddings.inspect import look_at
from plimsoll.embeddings.subsets import take_subset
from plimsoll.errors import EmbeddingError
from plimsoll.records.base import Record
from slow_vectors import PACKINGS, packed

RAW = b"5 2\nthe 3 4\nof 0 -1\nthe 9 9\nbad 1 x\nshort 1\nlarge 3e38 -3e38\n"


@pytest.mark.parametrize("packing", PACKINGS)
def test_everything_is_counted(tmp_path: Path, packing: str):
    path = packed(tmp_path / "x", RAW, packing)
    stages = []
    found = look_at(path, progress=lambda stage, done, total: stages.append((stage, done / total)))
    assert isinstance(found, Record)
    assert found.format == "word2vec text (fastText .vec)"
    assert (found.dimension, found.num_words, found.num_promised, found.num_duplicates) == (2, 3, 5, 1)
    assert found.num_entries == 6
    assert found.first_words == ("the", "of", "large")
    assert found.num_file_bytes == path.stat().st_size
    assert found.path.startswith(str(path))
    assert [(fault.kind, fault.examples) for fault in found.faults] == [
        ("not a number", ("line 5: 'bad': 'x' is not a number",)),
        ("wrong dimension", ("line 6: 'short 1', 1 numbers, not 2",)),
        ("wrong header", ("it states 5 words, but the file has 6",)),
    ]
    # The norms of (0, -1), (3, 4) and (3e38, -3e38). The last overflows in single precision if it is squared.
    assert found.norms == pytest.approx((1, 5, 18**0.5 * 1e38))
    assert found.num_full_bytes == 4 * 3 * 2
    assert stages[-1] == ("vectors", 1)


def test_the_words_of_a_faulty_file_are_as_many_whoever_counts_them(tmp_path: Path):
    """All commands count the same words in a faulty file.

    A line is an entry. A word counts once, if it has a vector.
    """
    (tmp_path / "x").write_bytes(RAW)
    looked = look_at(tmp_path / "x")
    converted = convert(tmp_path / "x", tmp_path / "y.npy")
    taken = take_subset(tmp_path / "x", ["the", "of"], cache=tmp_path).facts
    assert looked.num_entries == converted.num_entries == taken.num_entries == 6
    assert looked.num_words == converted.num_words == look_at(tmp_path / "y.npy").num_words == 3


def test_strict_a_fault_is_an_error(tmp_path: Path):
    (tmp_path / "x").write_bytes(RAW)
    with pytest.raises(
        EmbeddingError, match=r"x: line 5: 'bad': 'x' is not a number \(not a number\): correct the file"
    ):
        look_at(tmp_path / "x", strict=True)


def test_a_file_without_one_good_vector_has_no_lengths(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"a nan 1\nb inf 2\n")
    found = look_at(tmp_path / "x")
    assert (found.norms, found.num_words, found.faults[0].count) == (None, 0, 2)
    (tmp_path / "x").write_bytes(b"7 2\n")
    found = look_at(tmp_path / "x")
    assert (found.norms, found.num_words, [fault.kind for fault in found.faults]) == (None, 0, ["cut off"])


def test_lines_of_more_numbers_than_most_are_faults_unless_a_word_has_spaces(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"a 1 2\nb 1 2\nc 1 2 3\n. . 1 2\n")
    found = look_at(tmp_path / "x")
    assert (found.dimension, found.first_words) == (2, ("a", "b", ". ."))
    assert [(fault.kind, fault.examples) for fault in found.faults] == [
        ("wrong dimension", ("line 3: 'c 1 2 3', 3 numbers, not 2",))
    ]
