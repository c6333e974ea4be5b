"""Shared functions of formats: read a range of a file, find its newlines, check that it is UTF-8, and decode it.

The check decodes only bytes that are not ASCII. One comparison finds the 8-byte words that hold a newline, a control
character or a byte of 128 and above. Only these words are inspected, about 10 % of the bytes of most texts.

Words with a byte of 128 and above are decoded in one pass, with a zero between words that were not neighbours. The
result is valid exactly if the text is, because no character extends over a skipped word. If more than a quarter of
the words of a chunk must be inspected, the whole chunk is decoded.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.data.formats import Fault
from plimsoll.errors import DataError
from plimsoll.files.remote import descriptor_of, head_of

CHUNK_BYTES = 1 << 20  # fits an L2 cache of 2 MiB together with its temporaries; 128 KiB was 30 % slower
NEWLINE, RETURN = 10, 13
MARK_BYTES = len(codecs.BOM_UTF8)
LOOKAHEAD_BYTES = 8  # a character has at most 3 bytes after its first
_PROBE_BYTES = 8000  # as git decides: buffer_is_binary() in xdiff-interface.c
_HIGH_BITS = np.uint64(0x8080808080808080)
_DENSE_SHARE = 0.25
# Signatures of binary files, their names and the remedy: https://www.garykessler.net/library/file_sigs.html
_MAGICS = {
    b"\x1f\x8b": ("gzip", "rename it to end in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "rename it to end in .zst"),
    b"BZh": ("bzip2", "rename it to end in .bz2"),
    b"\xfd7zXZ\0": ("xz", "rename it to end in .xz"),
    b"PK\x03\x04": (
        "zip (.docx, .xlsx and .epub are zip files too)",
        "rename it to end in .zip, or extract its text",
    ),
    b"PAR1": ("parquet", "rename it to end in .parquet"),
    b"ARROW1": ("Arrow", "rename it to end in .arrow"),
    b"7z\xbc\xaf\x27\x1c": ("7z", "unpack it"),
    b"Rar!\x1a\x07": ("rar", "unpack it"),
    b"\x04\x22\x4d\x18": ("lz4", "unpack it"),
    b"\x1f\x9d": ("compress", "unpack it with `gunzip`"),
    b"\x5d\0\0": ("lzma", "unpack it with `xz --format=lzma -d`"),
    b"LZIP": ("lzip", "unpack it"),
    b"\x89LZO": ("lzop", "unpack it"),
    b"MSCF": ("a cabinet", "unpack it"),
    b"Obj\x01": ("Avro", "write its rows as JSON lines"),
    b"ORC": ("ORC", "write its rows as parquet"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an old Office file (.doc, .xls)", "save it as text"),
    b"SQLite format 3\0": ("an SQLite database", "write its rows as JSON lines"),
    b"\x89HDF\r\n": ("HDF5", "write its texts as JSON lines"),
    b"\x93NUMPY": ("an array of NumPy", "write its texts as JSON lines"),
    b"\x89PNG\r\n": ("a picture (PNG)", "give a text"),
    b"\xff\xd8\xff": ("a picture (JPEG)", "give a text"),
    b"%PDF-": ("PDF", "extract its text, for example with `pdftotext`"),
}
_CONVERT = "convert it, for example with `iconv -f latin1 -t utf-8`, or leave it out"


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file for reading and yield its descriptor.

    Raises:
        DataError: if the file cannot be opened, or reading it inside the block fails.
    """
    try:
        descriptor = descriptor_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): put it back, or allow reading it") from None
    try:
        yield descriptor
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}): check the disk, or leave the file out") from None
    finally:
        os.close(descriptor)


def read_head(path: str, num_bytes: int) -> bytes:
    """Return the first bytes of a file."""
    if (raw := head_of(path, num_bytes)) is not None:
        return raw
    with opened(path) as descriptor:
        return os.pread(descriptor, num_bytes, 0)


def text_begin(path: str) -> int:
    """Return the offset of the text: 3 if the file has a byte order mark, else 0.

    Raises:
        DataError: if the first bytes of the file are binary data or UTF-16.
    """
    head = read_head(path, _PROBE_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"its byte order mark 0x{head[:2].hex()} means UTF-16: convert it, for example "
            "with `iconv -f utf-16 -t utf-8`"
        )
    at = head.find(0)
    if at >= 0 or not _is_begin_of_utf8(head):  # valid text may begin with the same characters
        for magic, (kind, remedy) in _MAGICS.items():
            if head.startswith(magic):
                raise DataError(f"its first bytes are the signature of {kind}: leave it out, or {remedy}")
    if at >= 0:
        line = head.count(b"\n", 0, at) + 1
        raise DataError(
            f"line {line}: byte {at} is NUL, so it is binary, not text: leave it out, or give the text it was made from"
        )
    return MARK_BYTES if head.startswith(codecs.BOM_UTF8) else 0


class Chunk(NamedTuple):
    """Consecutive bytes of a part, and the next 8 bytes of the file (newlines beyond the end of the file)."""

    offset: int
    raw: NDArray[np.uint8]  # including the 8 bytes after the chunk
    num_bytes: int  # excluding these 8 bytes

    @property
    def ahead(self) -> bytes:
        """The 8 bytes after the chunk."""
        return self.raw[self.num_bytes : self.num_bytes + LOOKAHEAD_BYTES].tobytes()


def chunks(path: str, begin: int, end: int, hasher: xxhash.xxh3_128) -> Iterator[Chunk]:
    """Yield the chunks of a range of a file, all read into one buffer, and add their bytes to ``hasher``.

    Raises:
        DataError: if the file is shorter than ``end``.
    """
    words = np.empty(min(CHUNK_BYTES, -(-(end - begin) // 8) * 8) // 8 + 1, np.uint64)
    buffer = words.view(np.uint8)
    with opened(path) as descriptor:
        have = 0
        for offset in range(begin, end, len(buffer) - LOOKAHEAD_BYTES):
            buffer[:have] = buffer[len(buffer) - LOOKAHEAD_BYTES :][:have]
            have += os.preadv(descriptor, [buffer[have:].data], offset + have)
            num_bytes = min(len(buffer) - LOOKAHEAD_BYTES, end - offset)
            if have < num_bytes:
                raise DataError(
                    f"{path} ends before byte {end}, but was longer a moment ago: start again when nothing writes to it"
                )
            buffer[have:] = NEWLINE
            hasher.update(buffer[:num_bytes].data)
            yield Chunk(offset, buffer, num_bytes)
            have = max(have - num_bytes, 0)


class Looked(NamedTuple):
    """The indices of the newlines of a chunk, and whether the whole chunk is valid text."""

    newlines: NDArray[np.int64]
    is_valid: bool


def look_at(chunk: Chunk) -> Looked:
    """Find the newlines of a chunk, and check whether it is UTF-8 without a NUL byte."""
    raw, num_words = chunk.raw, chunk.num_bytes // 8
    whole = raw[: num_words * 8]
    words = whole.view(np.uint64)
    marked = (np.less(whole.view(np.int8), NEWLINE + 1).view(np.uint64) != 0).nonzero()[0]
    if num_words * 8 < chunk.num_bytes or len(marked) > _DENSE_SHARE * num_words:
        inside = raw[: chunk.num_bytes]
        newlines = (inside == NEWLINE).nonzero()[0]
        return Looked(newlines, 0 not in inside and is_utf8(_characters(chunk)))
    picked = words[marked]
    picked_bytes = picked.view(np.uint8)
    places = (picked_bytes == NEWLINE).nonzero()[0]
    newlines = (marked[places >> 3] << 3) + (places & 7)
    is_valid = (len(picked) == 0 or picked_bytes.min() > 0) and _are_utf8(chunk, marked, picked)
    return Looked(newlines, is_valid)


def _are_utf8(chunk: Chunk, marked: NDArray[np.int64], picked: NDArray[np.uint64]) -> bool:
    is_high = (picked & _HIGH_BITS) != 0
    after = chunk.ahead[: _num_continued(chunk.ahead)]
    high = marked[is_high]
    if not len(high):
        return not after
    pairs = np.zeros((len(high), 2), np.uint64)  # each word and the zero that separates it from the next
    pairs[:, 0] = picked[is_high]
    if chunk.offset and high[0] == 0:
        skipped = _num_continued(pairs[:1, 0].tobytes())
        pairs.view(np.uint8)[0, :skipped] = 0
    kept = np.ones(pairs.shape, np.bool_)
    kept[:-1, 1] = high[1:] != high[:-1] + 1
    kept[-1, 1] = high[-1] + 1 != chunk.num_bytes // 8
    return is_utf8(pairs[kept].tobytes() + after)


def is_utf8(raw: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        codecs.utf_8_decode(raw, "strict", True)
    except UnicodeDecodeError:
        return False
    return True


def _is_begin_of_utf8(raw: bytes) -> bool:
    """Return whether bytes are UTF-8, except for a character that is cut off at their end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return True


def _num_continued(raw: bytes) -> int:
    """Return how many leading bytes continue a character that begins in the bytes before ``raw``."""
    return next((number for number, byte in enumerate(raw[:3]) if byte & 0xC0 != 0x80), min(len(raw), 3))


def _characters(chunk: Chunk) -> bytes:
    """Return the bytes of the characters that begin in a chunk."""
    raw = chunk.raw[: chunk.num_bytes].tobytes()
    skipped = _num_continued(raw) if chunk.offset else 0
    return raw[skipped:] + chunk.ahead[: _num_continued(chunk.ahead)]


def faults_of(chunk: Chunk, first_line: int) -> Iterator[Fault]:
    """Yield the first fault in each line of a chunk that begins in line ``first_line``."""
    at = chunk.offset + (_num_continued(chunk.raw[:3].tobytes()) if chunk.offset else 0)
    for number, line in enumerate(_characters(chunk).split(b"\n"), first_line):
        if (fault := fault_in(line, at)) is not None:
            yield fault._replace(line=number)
        at += len(line) + 1


def fault_in(raw: bytes, offset: int) -> Fault | None:
    """Return the fault of the first byte that is NUL or not UTF-8; ``None`` if all bytes are valid.

    ``raw`` begins at ``offset`` in its file.
    """
    at_null = raw.find(0)
    try:
        codecs.utf_8_decode(raw if at_null < 0 else raw[:at_null], "strict", True)
    except UnicodeDecodeError as error:
        at = offset + error.start
        return Fault(at, f"byte {at} (0x{raw[error.start]:02x}) is not UTF-8 ({error.reason})", _CONVERT)
    return null_fault(offset + at_null) if at_null >= 0 else None


def null_fault(at: int) -> Fault:
    """Return the fault that byte ``at`` is NUL."""
    return Fault(at, f"byte {at} is NUL", "remove it")


def strings(raw: bytes, begins_B: NDArray[np.int64], ends_B: NDArray[np.int64]) -> list[str]:
    """Return the stretches ``raw[begin:end]`` as strings, 3 times as fast as decoding one by one.

    The bytes are not copied before they become strings, and Arrow allocates no memory from its pool.

    Args:
        raw: the bytes of all texts.
        begins_B: the offsets of the texts in ``raw``, ascending (int64).
        ends_B: the offsets at which the texts end, exclusive (int64).

    Raises:
        UnicodeDecodeError: if a text is not UTF-8.
    """
    import pyarrow  # takes about 40 ms, which training on stored tokens does not need

    borders = np.stack((begins_B, ends_B), axis=1).ravel()  # every second stretch is the gap between two texts
    array = pyarrow.LargeStringArray.from_buffers(
        max(len(borders) - 1, 0), pyarrow.py_buffer(borders), pyarrow.py_buffer(raw)
    )
    texts: list[str] = array.to_pylist()[::2]
    return texts
