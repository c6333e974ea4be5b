"""GloVe's text: no header, and a dimension that follows from the first lines."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.embeddings.formats import glove
from plimsoll.embeddings.formats.helpers.sources import HEAD_BYTES, Source
from slow_vectors import PACKINGS, files, first_vectors, is_utf8, numbers, packed, slow_lines


def read(path: Path, wanted: set[bytes] | None = None) -> dict[bytes, bytes]:
    """Return the first vector of each word of a file, which must be recognized."""
    source = Source(path)
    assert glove.recognises(source.head, source)
    vectors: dict[bytes, bytes] = {}
    for part in glove.open_vectors(source).parts(wanted):
        block = part()
        rows = block.rows(np.arange(len(block.words)))
        wrong = {fault.at for fault in rows.faults}
        for index, (word, row) in enumerate(zip(block.words, rows.matrix, strict=True)):
            if index not in wrong:
                vectors.setdefault(word, row.tobytes())
    return vectors


def vector(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_840b_file_has_words_with_spaces(tmp_path: Path, packing: str):
    raw = b", -0.082752 0.67204\n. . . -0.1573 -0.29517\nat name@domain.com 0.0044749 -0.31539\n\xc2\xa0 1 2\n"
    assert read(packed(tmp_path / "any name", raw, packing)) == {
        b",": vector(-0.082752, 0.67204),
        b". . .": vector(-0.1573, -0.29517),
        b"at name@domain.com": vector(0.0044749, -0.31539),
        b"\xc2\xa0": vector(1, 2),
    }


def test_line_ends_of_unicode_are_parts_of_words(tmp_path: Path):
    raw = "a\u2028b 1 2\n\u0085 3 4\nx\x0cy 5 6\n\r 7 8\nz\x1c 9 10\n".encode()
    assert list(read(packed(tmp_path / "x", raw))) == [
        "a\u2028b".encode(),
        "\u0085".encode(),
        b"x\x0cy",
        b"\r",
        b"z\x1c",
    ]


@pytest.mark.parametrize("dimension", [1, 1000])
def test_vectors_of_any_length(tmp_path: Path, dimension: int):
    texts = [f"{number / 7:.17g}" for number in range(dimension)]
    raw = "".join(f"{word} {' '.join(texts)}\n" for word in ("one", "two", "three")).encode()
    expected = np.array([np.float32(text) for text in texts], np.float32).tobytes()
    assert read(packed(tmp_path / "x", raw)) == dict.fromkeys([b"one", b"two", b"three"], expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_mark_of_the_byte_order_is_no_part_of_the_first_word(tmp_path: Path, packing: str):
    assert read(packed(tmp_path / "x", b"\xef\xbb\xbfthe 1 2\na 3 4\n", packing)) == {
        b"the": vector(1, 2),
        b"a": vector(3, 4),
    }


def test_tabs_may_stand_between_the_fields(tmp_path: Path):
    assert read(packed(tmp_path / "x", b"new york\t1\t2\r\na\t3\t4\r\n"))[b"new york"] == vector(1, 2)


def test_a_first_line_that_is_not_like_the_others_does_not_say_the_dimension(tmp_path: Path):
    assert read(packed(tmp_path / "x", b"a 1\nb 1 2\nc 3 4\n")) == {b"b": vector(1, 2), b"c": vector(3, 4)}


@pytest.mark.parametrize(
    "raw",
    [
        b"It was the best of times,\nit was the worst of times\n",
        b"the\na\nof\n",
        b'{"a": 1}\n{"a": 2}\n',
        b"text,label\nfine,1\n",
        b"\0\0\0 1 2\n",
        b"\n\n\n",
        b"9 4\n",
        b"9 4\nthe \x01\x02",  # binary word2vec, cut off
        b"9 4\nthe \x01\n\x02",
    ],
)
def test_what_is_no_text_of_vectors_is_not_recognised(tmp_path: Path, raw: bytes):
    source = Source(packed(tmp_path / "glove.6B.300d.txt", raw))
    assert not glove.recognises(source.head, source)


def test_a_line_longer_than_what_is_looked_at_is_not_taken_for_a_shorter_one(tmp_path: Path):
    source = Source(packed(tmp_path / "x", b"a" + b" 1" * HEAD_BYTES + b"\n"))
    assert not glove.recognises(source.head, source)


@given(data=st.data(), dimension=st.sampled_from([2, 3, 5]))
@settings(max_examples=60)
def test_hostile_files_with_good_first_lines_are_read_as_a_slow_reader_reads_them(data: st.DataObject, dimension: int):
    texts = data.draw(st.lists(numbers(), min_size=dimension, max_size=dimension))
    good = b"".join(b"good%d " % number + b" ".join(texts) + b"\n" for number in range(64))
    raw = good + data.draw(files(dimension)).replace(b"\0", b"")  # only binary files have this byte at their beginning
    expected = first_vectors(line for line in slow_lines(raw, dimension) if is_utf8(line[0]))
    with tempfile.TemporaryDirectory() as folder:
        for packing in PACKINGS:
            path = packed(Path(folder) / "x", raw, packing)
            assert read(path) == expected
            assert read(path, {b"good3", b"the"}) == {
                word: row for word, row in expected.items() if word in {b"good3", b"the"}
            }
