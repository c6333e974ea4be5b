"""What is a text of a plain file, and what is none; offsets counted by hand, for every way to cut a file in chunks."""

import numpy as np
import pytest

from plimsoll.data.formats import text
from plimsoll.errors import DataError


def spans(content: bytes, unit: str, chunk_bytes: int) -> list[tuple[int, int]]:
    chunks = [content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes)]
    return [tuple(row) for rows in text.spans(chunks, unit) for row in rows.tolist()]


LINES = [
    (b"ab\ncd\n", [(0, 2), (3, 5)]),
    (b"ab\ncd", [(0, 2), (3, 5)]),
    (b"ab\r\ncd\r", [(0, 2), (4, 6)]),
    (b"\n\r\n\nx\n\n", [(4, 5)]),
    (b"a\rb\nc", [(0, 3), (4, 5)]),  # a lone return does not split
    (b"\xef\xbb\xbfab\nc", [(3, 5), (6, 7)]),  # the byte order mark is not text
    (b"\xef\xbb\xbf\nc", [(4, 5)]),
    ("a\u2028b\x0cc\u0085d\n".encode(), [(0, 10)]),
    ("\u00e9\n\U0001f600".encode(), [(0, 2), (3, 7)]),
    (b"\n", []),
    (b"\xef\xbb\xbf", []),
    (b"", []),
]


@pytest.mark.parametrize("chunk_bytes", [8, 64])
@pytest.mark.parametrize(("content", "expected"), LINES)
def test_lines(content: bytes, expected: list[tuple[int, int]], chunk_bytes: int):
    assert spans(content, "line", chunk_bytes) == expected


def test_lines_do_not_depend_on_the_chunks():
    content = "\ufeffone\r\n\r\ntwo\u2028\n\nthr\u00e9\U0001f600e\r\r\nfour".encode()
    whole = spans(content, "line", 1 << 20)
    # a byte order mark must lie in one chunk: files are read in chunks of 256 KiB
    assert all(spans(content, "line", chunk_bytes) == whole for chunk_bytes in range(3, len(content)))
    assert [text.decode(content[start:end]) for start, end in whole] == [
        "one",
        "two\u2028",
        "thr\u00e9\U0001f600e\r",
        "four",
    ]


def test_a_document_is_the_file_without_its_mark():
    assert spans(b"a\nb\n", "document", 2) == [(0, 4)]
    assert spans(b"\xef\xbb\xbfa\nb\n", "document", 4) == [(3, 7)]
    assert spans(b"", "document", 4) == []
    assert spans(b"\xef\xbb\xbf", "document", 4) == []


def test_random_lines_against_python():
    generator = np.random.default_rng(0)
    for _ in range(50):
        content = bytes(generator.choice(list(b"ab\n\r"), 200).tolist())
        wanted = [line.removesuffix(b"\r") for line in content.split(b"\n")]
        found = [content[start:end] for start, end in spans(content, "line", 7)]
        assert found == [line for line in wanted if line]


@pytest.mark.parametrize("chunk_bytes", [3, 4, 100])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcd\xe9fgh", "byte 4 (0xe9) is not UTF-8"),
        ("ab\u00e9".encode() + b"\xff", "byte 4 (0xff) is not UTF-8"),
        ("abc\u20ac".encode()[:-1], "byte 3 (0xe2) is not UTF-8 (unexpected end of data)"),
        (b"\xe2\x82a", "byte 0 (0xe2) is not UTF-8"),
    ],
)
def test_bytes_that_are_not_utf8_are_named_with_their_place(content: bytes, message: str, chunk_bytes: int):
    with pytest.raises(DataError, match="iconv -f latin1 -t utf-8") as caught:
        spans(content, "line", chunk_bytes)
    assert message in str(caught.value)


def test_binary_and_utf16_are_refused_each_with_its_remedy():
    with pytest.raises(DataError, match="byte 2 is NUL, so it is binary"):
        spans(b"ab\0", "line", 100)
    with pytest.raises(DataError, match="iconv -f utf-16 -t utf-8"):
        spans("text".encode("utf-16"), "document", 100)
