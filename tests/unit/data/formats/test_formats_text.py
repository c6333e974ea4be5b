"""Lines, paragraphs and documents of plain text: results by hand, and a naive reading of any bytes with any cut."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from corpora import check_all_ways, cut_into, opened, written
from plimsoll.data.formats import Layout, Reading, text
from plimsoll.errors import DataError

WHITE = bytes(range(33))
BORDERS = st.sampled_from([(8, 8), (16, 8), (24, 16), (64, 24), (256, 64)])
GOOD = [b"a", b"b c", b"\n", b"\n\n", b"\r\n", b"\r", b" ", b"\t", b"\n \t\n", b"0123456789abcdef" * 2, b"\x0c"]
GOOD += [character.encode() for character in "\u00e9\u20ac\U0001f600\u2028\ufeff"]
BAD = [b"\xff", b"\0", b"\xc3", b"\xe2\x82", b"\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
HEAD = b"head\nhead\n\n"  # a NUL byte near the beginning would mark a binary file


def lines_of(content: bytes) -> list[bytes]:
    lines = [line.removesuffix(b"\r") for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    return [line for line in lines if line]


def paragraphs_of(content: bytes) -> list[bytes]:
    paragraphs: list[bytes] = []
    open_lines: list[bytes] = []
    for line in [*content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), b""]:
        if line.strip(WHITE) or 0 in line:
            open_lines.append(line)
        elif open_lines:
            paragraphs.append(b"\n".join(open_lines).removesuffix(b"\r"))
            open_lines = []
    return paragraphs


NAIVE = {"line": lines_of, "paragraph": paragraphs_of}


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return 0 not in raw


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"ab\ncd\n", ["ab", "cd"]),
        (b"ab\ncd", ["ab", "cd"]),
        (b"ab\r\ncd\r", ["ab", "cd"]),
        (b"\n\r\n\nx\n\n", ["x"]),
        (b"a\rb\nc", ["a\rb", "c"]),  # a lone carriage return does not split
        (b"a\r\r\nb", ["a\r", "b"]),
        (b"\xef\xbb\xbfab\nc", ["ab", "c"]),  # the byte order mark is not text
        (b"\xef\xbb\xbf\nc", ["c"]),
        ("a\u2028b\x0cc\u0085d\n".encode(), ["a\u2028b\x0cc\u0085d"]),
        (b" \nx", [" ", "x"]),
    ],
)
def test_lines(tmp_path: Path, content: bytes, lines: list[str]):
    check_all_ways(opened(written(tmp_path / "a.txt", content)), lines, [0, -1])


@pytest.mark.parametrize(
    ("content", "paragraphs"),
    [
        ("a\nb\n\nc\n", ["a\nb", "c"]),
        ("\n \na \r\n\tb\r\n \t\r\n\n\nc  ", ["a \r\n\tb", "c  "]),
        (" = Title = \n \n Text \n \n", [" = Title = ", " Text "]),  # as in WikiText
        ("\ufeffa\n\nb", ["a", "b"]),
        ("a\rb\n\u2028\nc", ["a\rb\n\u2028\nc"]),
    ],
)
def test_paragraphs(tmp_path: Path, content: str, paragraphs: list[str]):
    check_all_ways(opened(written(tmp_path / "a.txt", content), unit="paragraph"), paragraphs, [0, -1])


def test_a_document_is_the_file_without_its_mark(tmp_path: Path):
    written(tmp_path / "texts" / "1.txt", b"\xef\xbb\xbf\na\r\n\n")
    written(tmp_path / "texts" / "2.txt", b"\xef\xbb\xbf")
    written(tmp_path / "texts" / "3.txt", b"b")
    corpus = opened(tmp_path / "texts", unit="document")
    check_all_ways(corpus, ["\na\r\n\n", "b"], [1, 0])
    assert [path.name for path in corpus.left_out] == ["2.txt"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(GOOD)).map(b"".join), BORDERS, st.sampled_from(["line", "paragraph"]))
@example("\n\U0001f600".encode() * 9, (8, 8), "line")
def test_texts_do_not_depend_on_where_a_file_is_cut(content: bytes, borders: tuple[int, int], unit: str):
    texts = [raw.decode() for raw in NAIVE[unit](content)]
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.txt"), content)
        if "".join(texts).encode().strip(WHITE):
            check_all_ways(opened(path, unit=unit), texts, [3, 7, 1, 20, 4])
        else:
            with pytest.raises(DataError, match="nothing but white space"):
                opened(path, unit=unit)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(GOOD + BAD)).map(b"".join),
    BORDERS,
    st.sampled_from(["line", "paragraph"]),
    st.sampled_from([6, 20, 1 << 20]),
)
def test_what_is_skipped_is_what_a_naive_reading_cannot_read(
    content: bytes, borders: tuple[int, int], unit: str, limit_bytes: int
):
    content = HEAD + b"end\n\n" + content
    found = NAIVE[unit](content)
    texts = [raw.decode() for raw in found if is_text(raw) and len(raw) <= limit_bytes]
    reading = Reading(unit, on_error="skip", max_text_bytes=limit_bytes)
    with cut_into(*borders), tempfile.TemporaryDirectory() as folder:
        corpus = opened(written(Path(folder, "a.txt"), content), reading)
        check_all_ways(corpus, texts, [3, 7, 1, 20, -1])
        assert (corpus.num_skipped, len(corpus.skipped)) == (len(found) - len(texts),) * 2


@pytest.mark.parametrize("borders", [(8, 8), (64, 16), (1 << 20, 1 << 20)])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcd\xe9fgh", r"line 1: byte 4 \(0xe9\) is not UTF-8 .*iconv -f latin1 -t utf-8"),
        ("ab\u00e9".encode() + b"\xff", r"line 1: byte 4 \(0xff\) is not UTF-8"),
        ("abcde\u20ac".encode()[:-1], r"line 1: byte 5 \(0xe2\) is not UTF-8 \(unexpected end of data\)"),
        (b"abcdefg\xe2\x82a", r"line 1: byte 7 \(0xe2\) is not UTF-8"),
        (b"abcdefgh\x82a", r"line 1: byte 8 \(0x82\) is not UTF-8"),
        (b"a" * 40 + b"\xf0\x9f\x98\x80\x80", r"line 1: byte 44 \(0x80\) is not UTF-8"),
        (HEAD + b"\0", "line 4: byte 11 is NUL"),
        (b"a\r\nb\n\ncd\xff", r"line 4: byte 8 \(0xff\) is not UTF-8"),
        # the fault lies at the end of a chunk or part
        (b"abcd\nabcd\nab\xe2\nx", r"line 3: byte 12 \(0xe2\) is not UTF-8"),
    ],
)
def test_bytes_that_are_not_text_are_named_with_their_place(
    tmp_path: Path, content: bytes, message: str, borders: tuple[int, int]
):
    for unit in ("line", "paragraph", "document"):
        with cut_into(*borders), pytest.raises(DataError, match=rf"a\.txt as text: {message}"):
            opened(written(tmp_path / "a.txt", content), unit=unit)


@pytest.mark.parametrize("part_bytes", [8, 64, 1 << 20])
def test_faults_are_named_with_the_line_that_an_editor_shows(tmp_path: Path, part_bytes: int):
    lines = [b"a" * (number % 5) for number in range(40)]
    lines[7] = lines[23] = b"\xffbad"
    lines[31] = b"long" * 10
    path = written(tmp_path / "a.txt", b"\n".join(lines))
    with cut_into(part_bytes, 8):
        corpus = opened(path, Reading("line", on_error="skip", max_text_bytes=20))
    assert [entry.split(": ")[1] for entry in corpus.skipped] == ["line 8", "line 24", "line 32"]


def test_columns_are_not_asked_of_plain_text(tmp_path: Path):
    with pytest.raises(DataError, match="has no column 'label': leave it out, or ask for no columns"):
        opened(written(tmp_path / "a.txt", "x"), label="label")


def test_lines_that_are_not_those_that_were_indexed_are_refused():
    with pytest.raises(ValueError, match="3 lines were indexed and 2 found"):
        text.decode_run(b"a\nb\n", np.array([0, 2, 3, 4]), Layout("text", "line"))
