"""word2vec's text: a header, and lines that must agree with it."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll.embeddings.formats import word2vec_text
from plimsoll.embeddings.formats.helpers.sources import HEAD_BYTES, Source
from plimsoll.embeddings.inspect import look_at
from plimsoll.embeddings.opening import open_file
from slow_vectors import PACKINGS, packed

SMALL = b"3 2\nthe 0.5 -1\nand 2e-1 3\nU.S. 4 5\n"


def recognised(folder: Path, raw: bytes) -> bool:
    source = Source(packed(folder / "x", raw))
    return word2vec_text.recognises(source.head, source)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ends", [b"\n", b" \n", b"\r\n", b" \r\n"])
def test_a_file_is_read_behind_its_header(tmp_path: Path, packing: str, ends: bytes):
    source = Source(packed(tmp_path / "x", SMALL.replace(b"\n", ends), packing))
    vectors = word2vec_text.open_vectors(source)
    assert (vectors.dimension, vectors.num_promised, vectors.first_number) == (2, 3, 2)
    (block,) = [part() for part in vectors.parts(None)]
    assert block.words == [b"the", b"and", b"U.S."]
    rows = block.rows(np.arange(3))
    assert rows.matrix.tobytes() == np.array([[0.5, -1], [0.2, 3], [4, 5]], np.float32).tobytes()
    assert (block.faults, rows.faults) == ((), ())


@pytest.mark.parametrize(
    "raw",
    [
        SMALL,
        SMALL.replace(b" ", b"\t"),
        b"3 2\n",
        b"3 2",  # cut off in the header, but not a GloVe vector of one number
        b"3 2\nth",
        b"3 2\nthe 0.5",
        b"3 2\nthe 0.5 -",
        b"3 2\nthe 0.5 1e-",
        b"3 2\nthe 0.5 1",
        b"300 1000\nthe" + b" 0.123456789" * 999 + b" 1\n",
        b"300 100000\nthe" + b" 1" * 100_000 + b"\n",  # longer than the inspected head of the file
    ],
)
def test_a_header_that_its_lines_agree_with_is_recognised(tmp_path: Path, raw: bytes):
    assert recognised(tmp_path, raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"3 2\nthe 0.5 -1 3\n",  # a GloVe file with vectors of one number, whose first word is 3
        b"3 2\nthe 0.5\nthe 1\n",
        b"3 0\nthe\n",
        b"-3 2\nthe 1 2\n",
        b"3 2 1\nthe 1 2\n",
        b"3.0 2\nthe 1 2\n",
        b"the 2\nand 1 2\n",
        b"3 2\nthe 0.5 -1 3",
        b"3 2\nthe and of",
        b"3 2\nthe \x01\x02\0\x04\x05\x06\x07\x08",
        b"3 2\nthe \x01\x02\x03\x04\x05\x06\x07\x08",  # binary word2vec
        b"",
    ],
)
def test_other_first_lines_are_no_header(tmp_path: Path, raw: bytes):
    assert not word2vec_text.recognises(raw[:HEAD_BYTES], Source(packed(tmp_path / "x", SMALL)))


def test_a_vector_longer_than_what_is_looked_at_is_read(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"1 100000\nthe" + b" 1.5" * 100_000 + b"\n")
    found = look_at(tmp_path / "x", strict=True)
    assert (found.format, found.dimension, found.num_words) == (word2vec_text.TITLE, 100_000, 1)


@pytest.mark.parametrize("kept", range(1, len(SMALL)))
def test_a_file_that_is_cut_off_is_never_taken_for_another(tmp_path: Path, kept: int):
    (tmp_path / "x").write_bytes(SMALL[:kept])
    if kept < len(b"3 2"):
        with pytest.raises(Exception, match="is not in a known format of word vectors"):
            open_file(tmp_path / "x")
        return
    found = look_at(tmp_path / "x")
    assert found.format == word2vec_text.TITLE
    is_whole = kept >= len(SMALL) - 1  # at most the last line end is missing
    assert [fault.kind for fault in found.faults][-1:] == ([] if is_whole else ["cut off"])


def test_fewer_words_than_promised_are_said(tmp_path: Path):
    (tmp_path / "x").write_bytes(SMALL.replace(b"3 2", b"1,000 2").replace(b",", b""))
    (fault,) = look_at(tmp_path / "x").faults
    assert (fault.kind, fault.count, fault.examples) == (
        "cut off",
        1,
        ("3 of the 1,000 words that the header states",),
    )
