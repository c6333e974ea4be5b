"""Newlines and UTF-8 found in chunks, compared with Python's results; byte ranges as strings, compared with slices."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora import cut_into, written
from plimsoll.data.formats.helpers import scanning
from plimsoll.data.formats.helpers.scanning import strings
from plimsoll.errors import DataError


def chunks_of(path: Path, begin: int, end: int) -> tuple[list[scanning.Chunk], str]:
    hasher = xxhash.xxh3_128()
    found = [
        chunk._replace(raw=chunk.raw.copy()) for chunk in scanning.chunks(str(path), begin, end, hasher)
    ]  # copied, because chunks share a buffer
    return found, hasher.hexdigest()


@settings(max_examples=200, deadline=None)
@given(
    st.binary(min_size=1, max_size=200) | st.text(min_size=1, max_size=100).map(str.encode),
    st.sampled_from([8, 16, 64]),
)
def test_chunks_are_valid_exactly_if_their_file_is(content: bytes, chunk_bytes: int):
    with cut_into(1 << 20, chunk_bytes), tempfile.TemporaryDirectory() as folder:
        found, digest = chunks_of(written(Path(folder, "a"), content), 0, len(content))
    assert digest == xxhash.xxh3_128_hexdigest(content)
    assert b"".join(chunk.raw[: chunk.num_bytes].tobytes() for chunk in found) == content
    looked = [scanning.look_at(chunk) for chunk in found]
    newlines = [chunk.offset + place for chunk, look in zip(found, looked, strict=True) for place in look.newlines]
    assert newlines == [place for place, byte in enumerate(content) if byte == 10]
    fault = scanning.fault_in(content, 0)
    assert all(look.is_valid for look in looked) == (fault is None)
    faults = [fault for chunk in found for fault in scanning.faults_of(chunk, 0)]
    assert bool(faults) == (fault is not None)


@pytest.mark.parametrize("num_words", [16, 400])
def test_sparse_and_dense_text_is_checked_alike(tmp_path: Path, num_words: int):
    """Text with few and with many non-ASCII words is checked by the same rules.

    Few such words are checked one by one; if there are many, the whole chunk is decoded.
    """
    content = ("abcdefg " * 400).encode()
    for place in range(0, num_words * 8, 8):
        content = content[:place] + "\u20ac".encode() + content[place + 3 :]
    for broken in (content, content[:1] + b"a" + content[2:], content[:5] + b"\x80" + content[6:]):
        (chunk,), _ = chunks_of(written(tmp_path / "a", broken), 0, len(broken))
        assert scanning.look_at(chunk).is_valid == (broken is content)


def test_a_range_is_read_with_the_bytes_behind_it(tmp_path: Path):
    path = written(tmp_path / "a", bytes(range(65, 97)))
    (chunk,), _ = chunks_of(path, 8, 16)
    assert (chunk.offset, chunk.num_bytes, chunk.ahead) == (8, 8, bytes(range(81, 89)))
    (chunk,), _ = chunks_of(path, 24, 32)
    assert chunk.ahead == b"\n" * 8
    with pytest.raises(DataError, match="ends before byte 40, but was longer a moment ago"):
        chunks_of(path, 24, 40)


def test_binary_files_and_utf16_are_refused_each_with_its_remedy(tmp_path: Path):
    with pytest.raises(DataError, match="byte 2 is NUL, so it is binary"):
        scanning.text_begin(str(written(tmp_path / "a", b"ab\0")))
    with pytest.raises(DataError, match="iconv -f utf-16 -t utf-8"):
        scanning.text_begin(str(written(tmp_path / "a", "text".encode("utf-16"))))
    assert scanning.text_begin(str(written(tmp_path / "a", "\ufefftext"))) == 3
    assert np.array_equal(scanning.read_head(str(tmp_path / "a"), 4), b"\xef\xbb\xbft")


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=3))))
def test_stretches_are_what_slices_are(texts: list[tuple[str, str]]):
    lengths = np.array([[len(text.encode()), len(between.encode())] for text, between in texts], np.int64).reshape(
        -1, 2
    )
    borders = np.cumsum([0, *lengths.ravel()])
    raw = "".join(text + between for text, between in texts).encode()
    assert strings(raw, borders[:-1:2], borders[1::2]) == [text for text, _ in texts]


def test_what_is_not_utf_8_is_an_error():
    with pytest.raises(UnicodeDecodeError, match="0xe9"):
        strings(b"caf\xe9", np.array([0]), np.array([4]))
