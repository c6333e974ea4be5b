"""Plain UTF-8 text: a document is a whole file, a line is what stands between two newline bytes.

Lines are split at ``\\n`` only (not at ``\\r``, U+2028 or form feed, where `str.splitlines` would). A ``\\r`` before it
and a byte order mark at the begin of the file belong to no text; texts of zero bytes are left out. Newlines are
found with numpy in chunks, so the memory needed does not depend on the file. It does NOT convert encodings: bytes that
are not UTF-8 are an error, and a NUL byte near the begin marks a binary file.
"""

import codecs
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Unit
from plimsoll.errors import DataError

_BINARY_PROBE_BYTES = 8000  # as git decides: buffer_is_binary() in xdiff-interface.c
_NEWLINE, _RETURN = 10, 13


def spans(chunks: Iterable[bytes], unit: Unit) -> Iterator[NDArray[np.int64]]:
    """Return the byte spans of the documents or lines of one file; see `plimsoll.data.formats.Format`."""
    checked = _checked(chunks)
    return _lines(checked) if unit == "line" else _document(checked)


def decode(raw: bytes) -> str:
    """Return the text of one span."""
    return raw.decode("utf-8")


def _checked(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each chunk with its offset, the byte order mark cut off, once it is known to be UTF-8."""
    offset, torn = 0, b""  # torn: the first bytes of a character that the next chunk completes
    for chunk in chunks:
        if offset == 0:
            _refuse_binary(chunk[:_BINARY_PROBE_BYTES])
        if torn or not chunk.isascii():
            torn = _torn_tail(torn + chunk, offset - len(torn), final=False)
        mark = len(codecs.BOM_UTF8) if offset == 0 and chunk.startswith(codecs.BOM_UTF8) else 0
        yield offset + mark, chunk[mark:]
        offset += len(chunk)
    _torn_tail(torn, offset - len(torn), final=True)


def _refuse_binary(head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"its mark 0x{head[:2].hex()} says UTF-16: convert it, for example with `iconv -f utf-16 -t utf-8`"
        )
    if (at := head.find(0)) >= 0:
        raise DataError(f"byte {at} is NUL, so it is binary, not text: leave it out, or give the text it was made from")


def _torn_tail(raw: bytes, offset: int, final: bool) -> bytes:
    """Check that ``raw`` is UTF-8 and return the incomplete character at its end."""
    try:
        _, num_decoded = codecs.utf_8_decode(raw, "strict", final)
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8 ({error.reason}): convert it, for "
            f"example with `iconv -f latin1 -t utf-8`, or leave it out"
        ) from None
    return raw[num_decoded:]


def _document(chunks: Iterable[tuple[int, bytes]]) -> Iterator[NDArray[np.int64]]:
    start, end = None, 0
    for offset, chunk in chunks:
        start = offset if start is None else start
        end = offset + len(chunk)
    if start is not None and end > start:
        yield np.array([[start, end]])


def _lines(chunks: Iterable[tuple[int, bytes]]) -> Iterator[NDArray[np.int64]]:
    start, end, last_byte = None, 0, 0  # start: where the line that the next chunk continues begins
    for offset, chunk in chunks:
        start = offset if start is None else start
        raw = np.frombuffer(chunk, np.uint8)
        newlines = np.flatnonzero(raw == _NEWLINE)
        if len(newlines):
            before = raw[newlines - 1]
            if newlines[0] == 0:  # its neighbour is in the chunk before
                before[0] = last_byte
            ends = newlines + offset - (before == _RETURN)
            starts = np.concatenate(([start], newlines[:-1] + offset + 1))
            yield _non_empty(starts, ends)
            start = offset + int(newlines[-1]) + 1
        last_byte, end = chunk[-1] if chunk else last_byte, offset + len(chunk)
    if start is not None:
        yield _non_empty(np.array([start]), np.array([end - (last_byte == _RETURN)]))


def _non_empty(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack((starts, ends), axis=1)[ends > starts]
