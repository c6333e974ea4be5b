"""A Plimsoll table as a source of vectors: only words with a vector count, at any place and in any part."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats import table as table_format
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.embeddings.table import create_table
from plimsoll.embeddings.wanted import BUILT, EXACT, LOWER, MISSING, NO_WORD, PADDING

WORDS = ["<pad>", "a b", None, "lost", "The", "built", ""]
FOUND = [PADDING, EXACT, NO_WORD, MISSING, LOWER, BUILT, EXACT]


@pytest.fixture(params=["float32", "float16"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    table = create_table(tmp_path / "x", WORDS, 2, request.param)
    table.found[:] = FOUND
    table.vectors[:] = np.arange(14).reshape(7, 2) / 4
    return tmp_path / "x"


def read(path: Path, wanted: set[bytes] | None = None):
    vectors = table_format.open_vectors(Source(path))
    words, rows, num_words = [], [], 0
    for part in vectors.parts(wanted):
        block = part()
        assert block.faults == ()
        words += block.words
        rows += block.rows(np.arange(len(block.words))).matrix.tolist()
        num_words += block.num_words
    assert vectors.share_read() == 1
    return words, rows, num_words


ALL = ([b"a b", b"The", b"built", b""], [[0.5, 0.75], [2, 2.25], [2.5, 2.75], [3, 3.25]], 7)


def test_rows_without_a_vector_of_their_own_are_left_out(path: Path):
    source = Source(path)
    assert table_format.recognises(source.head, source)
    assert table_format.open_vectors(source).dimension == 2
    assert read(path) == ALL
    assert read(path, {b"The", b"lost", b"<pad>", b"\xff"}) == ([b"The"], [[2, 2.25]], 7)


def test_parts_are_parts_of_the_words(path: Path, monkeypatch: pytest.MonkeyPatch):
    for num_words in (1, 2, 3, 6, 7, 8):
        monkeypatch.setattr(table_format, "_PART_WORDS", num_words)
        assert read(path) == ALL
        parts = list(table_format.open_vectors(Source(path)).parts(None))
        assert len(parts) == -(-7 // num_words)
        assert parts[-1]().places.tolist()[-1] == 6 % num_words


def test_a_packed_table_is_unpacked_and_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    source = Source(packed)
    assert table_format.recognises(source.head, source)
    vectors = table_format.open_vectors(source)
    block = next(iter(vectors.parts({b""})))()
    assert block.rows(np.array([0])).matrix.tolist() == [[3, 3.25]]
    assert len(list(folder.iterdir())) == 1
    del vectors
    assert list(folder.iterdir()) == []


def test_numbers_that_are_not_finite_are_faults(path: Path):
    from plimsoll.embeddings.table import open_table

    open_table(path, "write").vectors[4, 1] = np.nan
    (part,) = table_format.open_vectors(Source(path)).parts(None)
    (fault,) = part().rows(np.arange(4)).faults
    assert (fault.kind, fault.at) == ("finite", 1)


def test_words_make_no_vectors_of_their_parts(path: Path):
    assert table_format.open_vectors(Source(path)).build([b"x"]) is None
