"""Plain UTF-8 text: a text is a file (document), a line, or a paragraph between blank lines.

Lines end only at ``\\n``, not at ``\\r``, U+2028 or form feed, unlike `str.splitlines`. A ``\\r`` before the newline
and a byte order mark at the beginning of the file are not part of any text. Lines of zero bytes are not texts.
Paragraphs are separated by at least one line that is empty or only white space (bytes up to 32). A document is its
whole file. Encodings are not converted: bytes that are not UTF-8 and NUL bytes are faults.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.data.formats import Fault, Found, Layout, Part, Reading
from plimsoll.data.formats.helpers.scanning import (
    NEWLINE,
    RETURN,
    Chunk,
    chunks,
    faults_of,
    look_at,
    strings,
    text_begin,
)
from plimsoll.errors import DataError

_WHITE = bytes(range(33))
_LARGEST_WHITE = 32
_FIRST_LOOK_BYTES = 512
_FEW = 16  # lines; up to this many, decoding one by one is as fast


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout of a text file, and the offset at which its text begins."""
    if asked := [*(reading.columns or ()), *filter(None, [reading.label])]:
        raise DataError(f"it is plain text, which has no column {asked[0]!r}: leave it out, or ask for no columns")
    return Layout("text", reading.unit), text_begin(path)


def scan(part: Part) -> Found:
    """Find the texts that begin in a part or at its end; see `plimsoll.data.formats.Format`."""
    hasher = xxhash.xxh3_128()
    faults: list[Fault] = []
    starts, inks, is_blank, num_lines = [], [], True, 0
    for chunk in chunks(part.path, part.begin, part.end, hasher):
        newlines, is_valid = look_at(chunk)
        if not is_valid:
            faults += faults_of(chunk, num_lines)
        num_lines += len(newlines)
        is_blank = is_blank and _is_blank(chunk, part.first)
        if part.layout.unit == "line":
            starts.append(_line_starts(chunk, newlines, part.first))
        elif part.layout.unit == "paragraph":
            starts.append(newlines + (chunk.offset + 1))
            inks.append(_inks(chunk, newlines, part.first, is_valid))
        elif chunk.offset <= part.first < chunk.offset + chunk.num_bytes:
            starts.append(np.array([part.first], np.int64))
    return Found(
        np.concatenate(starts) if starts else np.empty(0, np.int64),
        hasher.digest(),
        tuple(faults),
        num_lines,
        is_blank=is_blank,
        inks=_joined(inks) if inks else None,
    )


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return some texts, given their bytes; see `plimsoll.data.formats.Format`."""
    if layout.unit == "document":
        return [raw.decode("utf-8") for raw in raws]
    if layout.unit == "line":
        borders = np.cumsum([0, *map(len, raws)])
        lines = _whole_lines(b"".join(raws), borders)
        return _lines(b"\n".join(raws), len(raws)) if lines is None else lines
    return [_paragraph(raw).decode("utf-8") for raw in raws]


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from one bytes object; see `plimsoll.data.formats.Format`."""
    if layout.unit == "line":
        lines = _whole_lines(raw, borders)
        return _lines(raw, len(borders) - 1) if lines is None else lines
    return decode([raw[begin:end] for begin, end in pairwise(borders.tolist())], layout)


def _whole_lines(raw: bytes, borders: NDArray[np.int64]) -> list[str] | None:
    """Return the texts if each is one line with its newline; otherwise, or for few texts, ``None``."""
    if len(borders) <= _FEW:
        return None
    view, ends = np.frombuffer(raw, np.uint8), borders[1:] - 1
    if np.count_nonzero(view == NEWLINE) != len(ends) or not (view[ends] == NEWLINE).all():
        return None
    return strings(raw, borders[:-1], ends - (view[ends - 1] == RETURN))


def _lines(raw: bytes, num_lines: int) -> list[str]:
    """Return the non-empty lines. Raise if their number differs from ``num_lines``, the indexed number."""
    lines = [line.decode("utf-8") for line in raw.replace(b"\r\n", b"\n").removesuffix(b"\r").split(b"\n") if line]
    if len(lines) != num_lines:
        raise ValueError(f"{num_lines} lines were indexed and {len(lines)} found")
    return lines


def _paragraph(raw: bytes) -> bytes:
    """Return a paragraph without the blank lines after it and without the end of its last line."""
    newline = raw.find(b"\n", len(raw.rstrip(_WHITE)))
    return (raw if newline < 0 else raw[:newline]).removesuffix(b"\r")


def _is_blank(chunk: Chunk, first: int) -> bool:
    """Return whether a chunk is only white space after ``first``, the offset at which the first text may begin."""
    raw = chunk.raw[max(first - chunk.offset, 0) : chunk.num_bytes]
    return not (raw[:_FIRST_LOOK_BYTES] > _LARGEST_WHITE).any() and not (raw > _LARGEST_WHITE).any()


def _line_starts(chunk: Chunk, newlines: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Return the offsets at which non-empty lines begin, after the newlines of a chunk."""
    starts: NDArray[np.int64] = newlines + 1
    if chunk.offset <= first < chunk.offset + chunk.num_bytes:
        starts = np.concatenate(([first - chunk.offset], starts))
    heads = chunk.raw[starts]
    if heads.min(initial=RETURN + 1) <= RETURN:
        is_text = heads != NEWLINE
        returns = (heads == RETURN).nonzero()[0]
        is_text[returns] = chunk.raw[starts[returns] + 1] != NEWLINE
        starts = starts[is_text]
    starts += chunk.offset
    return starts


def _inks(chunk: Chunk, newlines: NDArray[np.int64], first: int, is_valid: bool) -> NDArray[np.bool_]:
    """Return, for each line or part of a line in a chunk, whether it has visible characters."""
    raw = chunk.raw[: chunk.num_bytes]
    if not is_valid:
        raw = np.where(raw == 0, np.uint8(255), raw)  # so that faulty bytes belong to a text
    begins = np.concatenate(([max(first - chunk.offset, 0)], newlines + 1))
    inks = np.zeros(len(begins), np.bool_)
    begins = begins[begins < chunk.num_bytes]
    if len(begins):
        inks[: len(begins)] = np.maximum.reduceat(raw, begins) > _LARGEST_WHITE
    return inks


def _joined(inks: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Concatenate the results of `_inks` of consecutive chunks. A line that crosses a chunk boundary is one element."""
    for before, after in pairwise(inks):
        after[0] |= before[-1]
    return np.concatenate([*(ink[:-1] for ink in inks[:-1]), inks[-1]])


class Paragraphs:
    """Finder for the beginnings of paragraphs, from the scanned parts of a file in order. ``first`` is `Part.first`."""

    def __init__(self, first: int) -> None:
        self._line, self._has_ink, self._is_new = first, False, True

    def add(self, found: Found) -> NDArray[np.int64]:
        """Return the byte offsets of the paragraphs whose first visible character is in this part."""
        assert found.inks is not None
        lines = np.concatenate(([self._line], found.starts))
        inks = found.inks
        inks[0] |= self._has_ink
        is_new = np.concatenate(([self._is_new], ~inks[:-1]))  # the previous line is blank or does not exist
        starts = lines[inks & is_new]
        self._line, self._has_ink = int(lines[-1]), bool(inks[-1])
        self._is_new = bool(is_new[-1]) and not self._has_ink
        return starts
