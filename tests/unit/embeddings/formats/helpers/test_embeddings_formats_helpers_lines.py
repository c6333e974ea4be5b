"""Lines of word vectors: equal to the results of a slow reader for any division of the file into parts."""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.embeddings import opening
from plimsoll.embeddings.formats.helpers import lines as _lines
from plimsoll.embeddings.formats.helpers.lines import Layout, Lines, dimension_of, is_number, separator_of
from plimsoll.embeddings.formats.helpers.sources import Source
from plimsoll.errors import EmbeddingError
from slow_vectors import HOSTILE_WORDS, PACKINGS, files, is_utf8, packed, slow_lines, words

HEADER = b"17 3 \r\n"


@contextmanager
def parts_of(part_bytes: int, more_bytes: int) -> Iterator[None]:
    """Read files and streams in parts of `part_bytes`, and the rest of a file's last line in steps of `more_bytes`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lines, "_PART_BYTES", part_bytes)
        patch.setattr(_lines, "_MORE_BYTES", more_bytes)
        patch.setattr(Source.chunks, "__defaults__", (part_bytes,))
        yield


def lines_of(lines: Lines, wanted: Collection[bytes] | None) -> tuple[dict[int, tuple[bytes, bytes | str]], int]:
    """Return the word and vector, or the kind of fault, by line number, and the number of lines."""
    found: dict[int, tuple[bytes, bytes | str]] = {}
    first = 0
    for part in lines.parts(wanted):
        block = part()
        assert len(block.words) == len(block.places)
        rows = block.rows(np.arange(len(block.words)))
        assert rows.matrix.dtype == np.float32
        assert rows.matrix.shape == (len(block.words), lines.dimension)
        for place, word, row in zip(block.places.tolist(), block.words, rows.matrix, strict=True):
            found[first + place] = (word, row.tobytes())
        for fault in rows.faults:
            place = first + int(block.places[fault.at])
            found[place] = (found[place][0], fault.kind)
        for fault in block.faults:
            assert first + fault.at not in found
            found[first + fault.at] = (b"", fault.kind)
        first += block.num_words
    assert lines.share_read() in {0.0, 1.0}  # a file without lines has no parts
    return found, first


def slowly(raw: bytes, dimension: int, separator: bytes, wanted: Collection[bytes] | None):
    """Return the expected result of `lines_of`."""
    lines = slow_lines(raw, dimension, separator)
    if wanted is None:
        lines = [(b"", "utf-8") if not is_utf8(word) else (word, vector) for word, vector in lines]
    is_seen = [wanted is None or word in wanted or vector in {"dimension", "truncated"} for word, vector in lines]
    return {number: line for number, line in enumerate(lines) if is_seen[number]}, len(lines)


@pytest.mark.long
@given(
    data=st.data(),
    dimension=st.sampled_from([1, 2, 3, 7]),
    separator=st.sampled_from([b" ", b" ", b"\t"]),
    header=st.sampled_from([b"", HEADER]),
    part_bytes=st.integers(16, 300),
    more_bytes=st.integers(16, 64),
)
@settings(max_examples=150)
def test_hostile_files_are_read_as_a_slow_reader_reads_them(
    data: st.DataObject, dimension: int, separator: bytes, header: bytes, part_bytes: int, more_bytes: int
):
    raw = data.draw(files(dimension, separator).filter(lambda raw: not raw.startswith((b"\x1f\x8b", b"PK"))))
    there = sorted({word for word, _ in slow_lines(raw, dimension, separator)})
    near = [word[:8] + b"x" for word in there] + [word.split(separator)[0] for word in there]
    wanted = data.draw(
        st.one_of(
            st.none(),
            st.lists(st.one_of(st.sampled_from([*there, *near, b"", b"absent"]), words()), max_size=8).map(frozenset),
        )
    )
    layout = Layout(dimension, separator[0], len(header), 1 + bool(header))
    with tempfile.TemporaryDirectory() as folder, parts_of(part_bytes, more_bytes):
        for packing in PACKINGS:
            path = packed(Path(folder) / "vectors", header + raw, packing)
            read = lines_of(Lines(Source(path), layout), wanted)
            assert read == slowly(raw, dimension, separator, wanted), packing


def read(folder: Path, raw: bytes, dimension: int, wanted: Collection[bytes] | None = None, packing: str = ""):
    return lines_of(Lines(Source(packed(folder / "vectors", raw, packing)), Layout(dimension, ord(" "))), wanted)


def test_a_line_is_read_from_the_right(tmp_path: Path):
    raw = b". . . 1 2\nname@domain.com at 3 4\n 5 6\nx 7 8 \r\n"
    vectors = [np.array(pair, np.float32).tobytes() for pair in ([1, 2], [3, 4], [5, 6], [7, 8])]
    names = [b". . .", b"name@domain.com at", b"", b"x"]
    assert read(tmp_path, raw, 2) == (dict(enumerate(zip(names, vectors, strict=True))), 4)
    assert read(tmp_path, raw, 2, {b". . .", b"", b"name@domain.com"}) == (
        {0: (names[0], vectors[0]), 2: (b"", vectors[2])},
        4,
    )


@pytest.mark.parametrize("dimension", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_short_line_is_found_among_long_ones(tmp_path: Path, dimension: int, packing: str):
    """A short line is found among long ones.

    This includes a line that lacks 256 numbers. The next word contains as many extra spaces, so their total is right.
    """
    numbers = b" 1.5" * dimension
    for missing in {1, 256} & {*range(dimension + 1)}:
        short = b"b" + b" 1.5" * (dimension - missing) + b"\n"
        raw = b"a" + numbers + b"\n" + short + b"c" + b" x" * missing + numbers + b"\nd" + numbers + b"\n"
        found, num_lines = read(tmp_path, raw, dimension, None, packing)
        assert num_lines == 4
        assert found[1] == (b"", "dimension")
        assert [found[number][0] for number in (0, 2, 3)] == [b"a", b"c" + b" x" * missing, b"d"]
        assert read(tmp_path, raw, dimension, {b"b"}, packing)[0] == {1: (b"", "dimension")}


def test_a_space_at_the_end_of_a_line_is_no_number(tmp_path: Path):
    found, _ = read(tmp_path, b"a 1 2\nb 3 \nc 4 5\n", 2)
    assert found[1] == (b"", "dimension")
    assert [found[0][0], found[2][0]] == [b"a", b"c"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_line_without_an_end_is_cut_off_if_numbers_are_missing(tmp_path: Path, packing: str):
    assert read(tmp_path, b"a 1 2\nb 3", 2, {b"a"}, packing)[0][1] == (b"", "truncated")
    assert read(tmp_path, b"a 1 2\nb 3 4", 2, None, packing)[0][1] == (b"b", np.array([3, 4], np.float32).tobytes())


def test_the_last_line_of_an_archive_that_ends_early_is_not_used(tmp_path: Path):
    path = packed(
        tmp_path / "vectors", b"".join(b"w%d 0.25 %d.5\n" % (number, number) for number in range(3000)), "gzip"
    )
    whole = path.read_bytes()
    for kept in (0.3, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * kept)])
        with parts_of(1000, 16):
            found, num_lines = lines_of(Lines(Source(path), Layout(2, ord(" "))), None)
        assert 1 < num_lines < 3000
        assert found.pop(num_lines - 1) == (b"", "truncated")
        for number, line in found.items():
            assert line == (b"w%d" % number, np.array([0.25, number + 0.5], np.float32).tobytes())


def test_words_that_begin_alike_are_told_apart(tmp_path: Path):
    near = [word for word in HOSTILE_WORDS if word.startswith(b"eight")]
    raw = b"".join(word + b" %d\n" % number for number, word in enumerate(near))
    for number, word in enumerate(near):
        assert read(tmp_path, raw, 1, {word})[0] == {number: (word, np.float32(number).tobytes())}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_word_longer_than_a_part_is_one_word(tmp_path: Path, packing: str):
    word = b"long" * 1000
    with parts_of(64, 16):
        assert read(tmp_path, b"a 1\n" + word + b" 2\nb 3\n", 1, {word, b"b"}, packing) == (
            {1: (word, np.float32(2).tobytes()), 2: (b"b", np.float32(3).tobytes())},
            3,
        )


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_line_that_does_not_end_is_refused_early(tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_lines, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(
        EmbeddingError, match="has a line of more than 1 MiB, which is not a word with its vector: give"
    ):
        read(tmp_path, b"a 1\n" + b"x" * (5 << 20), 1, None, packing)


def test_the_share_read_grows_to_one(tmp_path: Path):
    path = packed(tmp_path / "vectors", b"word 1\n" * 100)
    with parts_of(100, 16):
        lines = Lines(Source(path), Layout(1, ord(" ")))
        assert lines.share_read() == 0
        shares = [lines.share_read() for _ in lines.parts(None)]
    assert shares == [pytest.approx(number / 7) for number in range(1, 7)] + [1.0]


@pytest.mark.parametrize("packing", PACKINGS)
def test_parts_may_be_read_on_all_cores_and_are_in_order(tmp_path: Path, packing: str):
    raw = b"".join(b"w%d %d\n" % (number, number) for number in range(3000))
    path = packed(tmp_path / "vectors", raw, packing)
    with parts_of(100, 16):
        lines = Lines(Source(path), Layout(1, ord(" ")))
        read = list(opening.read_parts(lines, None, lambda block: block.rows(np.arange(len(block.words)))))
    assert len(read) > 300
    assert [word for block, _, _ in read for word in block.words] == [b"w%d" % number for number in range(3000)]
    assert np.concatenate([rows.matrix[:, 0] for _, rows, _ in read]).tolist() == list(range(3000))


def test_rows_of_any_words_of_a_part_are_theirs(tmp_path: Path):
    lines = Lines(Source(packed(tmp_path / "vectors", b"a 1 2\nb 3 x\nc 5 6\nd 7 nan\n")), Layout(2, ord(" ")))
    (part,) = lines.parts(None)
    block = part()
    assert block.rows(np.array([2, 0])).matrix.tolist() == [[5, 6], [1, 2]]
    assert [(fault.kind, fault.at, fault.what) for fault in block.rows(np.array([3, 0, 1])).faults] == [
        ("number", 2, "'x' is not a number"),
        ("finite", 0, "number 2 of 2 is nan"),
    ]
    assert block.rows(np.array([], np.int64)).matrix.shape == (0, 2)


@pytest.mark.parametrize(
    ("head", "dimension"),
    [
        (b"the 0.1 0.2\na 1 2\n", 2),
        (b"the 0.1 0.2", 2),
        (b"the 0.1 0.2\na 1", 2),  # the last line may be incomplete
        (b"the\t0.1\t0.2\n", 2),
        (b". . . 1 2 3\n1 2 3 4\nx y 1 2 3\n", 3),
        (b"1 2 3 4\n", 3),
        (b"a 1 2 \r\nb 1 2 \r\n", 2),
        (b"a 1 2\nb 1\nc 1 2\n", 2),
        (b"\n\na 1 2\n", 2),
        (b"It was the best of times,\nit was the worst of times\n", 0),
        (b"word\nother\n", 0),
        (b"", 0),
        (b"\n", 0),
        (b"a nan inf -1e5\n", 3),
    ],
)
def test_the_dimension_is_what_most_lines_end_in(head: bytes, dimension: int):
    assert dimension_of(head) == dimension


def test_fields_are_parted_by_what_there_is_more_of():
    assert [separator_of(line) for line in (b"a 1 2", b"a\t1\t2", b"new york\t1\t2", b"a", b"")] == [32, 9, 9, 32, 32]


def test_a_number_is_what_python_takes_for_one():
    assert all(map(is_number, [b"1", b"-1.5e-3", b"nan", b"inf"]))
    assert not any(map(is_number, [b"", b"x", b"1,5", b"0x10", b"\xff"]))
