"""Writing of the index of some files from their scanned parts: the beginnings of texts, and the gaps between them.

The index has three files:

- ``begins.bin`` (int64, one entry more than texts): the offsets of texts in all files laid end to end. A text
  reaches to the beginning of the next, or to the end of its file. This includes its newline and skipped bytes after it.
- ``gaps.bin`` (pairs of int64): the indices and ends of texts that are followed by more than 1 MiB of skipped bytes, or
  by a skipped row.
- ``labels.bin``: the class index of each text.

Memory: nothing per text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.data.formats import Fault, Found, Labels, Layout, Part, Reading
from plimsoll.data.formats.helpers.columns import MOST_LABELS, listed
from plimsoll.data.formats.helpers.records import too_long
from plimsoll.data.formats.helpers.scanning import opened
from plimsoll.data.formats.text import Paragraphs
from plimsoll.errors import DataError

BEGINS_FILE, GAPS_FILE, LABELS_FILE = "begins.bin", "gaps.bin", "labels.bin"
MOST_SKIPPED_LISTED = 100
_LONG_BYTES = 1 << 20
_CODES_AT_ONCE = 1 << 20
_CONVERTED = {"packed", "tagged"}  # lengths were checked during conversion
_WHITE = {"line": b"\r\n", "paragraph": bytes(range(33)), "document": b"\r\n"}


class FileFault(Exception):
    """A plain text file that was found in a folder or by a pattern has a fault, and is left out of the index."""


class Source(NamedTuple):
    """A file to index: its name for messages, its layout and its size.

    ``is_optional``: unless faulty texts are skipped, a fault leaves the whole file out of the index without an error.
    """

    name: str
    is_optional: bool  # if it is not text, it is left out without an error
    layout: Layout
    num_bytes: int


class Rows:
    """A writer of the index, to which files and their scanned parts are added in order."""

    def __init__(self, folder: Path, reading: Reading) -> None:
        self._begins = (folder / BEGINS_FILE).open("wb")
        self._codes = (folder / LABELS_FILE).open("w+b")
        self._folder, self._reading = folder, reading
        self._names: dict[str | int, int] = {}
        self._gaps = (folder / GAPS_FILE).open("wb")
        self._base_bytes = self._num_texts = self._first_text = self._num_gaps = self._first_gap = 0
        self._last_gap = -1
        self.num_skipped = self.num_suspects = 0
        self.first_suspect = ""
        self.skipped: list[str] = []
        self.places = xxhash.xxh3_128()  # hash of the offsets of skipped rows

    def close(self) -> None:
        """Close the files."""
        for file in (self._begins, self._codes, self._gaps):
            file.close()

    def begin(self, source: Source, first: int) -> None:
        """Begin the next file, whose first text may begin at byte ``first``."""
        self._source = source
        self._first_text, self._first_gap = self._num_texts, self._num_gaps
        self._paragraphs = Paragraphs(first)
        self._starts = np.empty(0, np.int64)  # the start of the last text, which may extend into the next part
        self._last_codes = np.empty(0, np.uint32)
        self._is_dropped = np.empty(0, np.bool_)
        self._num_lines = 0
        self._late_faults: list[Fault] = []

    def add(self, part: Part, found: Found) -> None:
        """Add the scanned texts of the next part of the file.

        Raises:
            DataError: at the first fault, if faults are not skipped.
            FileFault: at the first fault, if the whole file is to be left out because of it.
        """
        starts = found.starts if found.inks is None else self._paragraphs.add(found)
        starts = np.concatenate((self._starts, starts))
        dropped = np.zeros(len(starts), np.bool_)
        dropped[: len(self._is_dropped)] = self._is_dropped
        is_fault = dropped.copy()
        if found.is_empty is not None:
            dropped[len(self._is_dropped) :] = found.is_empty
        codes = None
        if found.labels is not None:
            codes = np.concatenate((self._last_codes, self._numbered(found.labels)))
        # A character may begin in this part and be faulty in the next, in which its text has its first visible
        # character.
        faults = [*self._late_faults, *found.faults]
        self._late_faults = [_later(fault, found.num_lines) for fault in faults if fault.at >= part.end]
        for fault in faults[: len(faults) - len(self._late_faults)]:
            number = max(int(np.searchsorted(starts, fault.at, "right")) - 1, 0)
            if not is_fault[number : number + 1].any():
                self._meet(fault)
                is_fault[number : number + 1] = dropped[number : number + 1] = True
        for suspect in found.suspects:
            self.num_suspects += 1
            line = self._num_lines + (suspect.line or 0) + 1
            self.first_suspect = (
                self.first_suspect or f"{self._source.name}: line {line}: {suspect.why}: {suspect.remedy}"
            )
        self._num_lines += found.num_lines
        self._write(part.path, starts, dropped, codes)

    def end(self, path: str) -> int:
        """End the current file, and return the number of its texts."""
        starts, dropped = np.append(self._starts, self._source.num_bytes), np.append(self._is_dropped, True)
        self._write(path, starts, dropped, np.append(self._last_codes, np.uint32(0)))
        num_texts = self._num_texts - self._first_text
        self._base_bytes += self._source.num_bytes if num_texts else 0  # a file without texts is not in the index
        return num_texts

    def leave_out(self, why: str) -> None:
        """Remove the texts of the current file from the index."""
        self._num_texts = self._first_text
        self._last_gap = min(self._last_gap, self._first_text - 1)
        self._num_gaps = self._first_gap
        for file, place in ((self._begins, 8 * self._first_text), (self._gaps, 16 * self._first_gap)):
            file.seek(place)
            file.truncate()
        self.list_skipped(self._source.name, why)

    def list_skipped(self, name: str, why: str) -> None:
        """Count a skipped row or file of ``name``, and record the first 100 reasons."""
        self.num_skipped += 1
        if len(self.skipped) < MOST_SKIPPED_LISTED:
            self.skipped.append(f"{name}: {why}")

    def finish(self) -> list[str]:
        """Write the end of the index, and return the names of the classes."""
        self._begins.write(np.int64(self._base_bytes).tobytes())
        self._begins.flush()
        return self._sort_labels()

    def _meet(self, fault: Fault) -> None:
        line = "" if fault.line is None else f"line {self._num_lines + fault.line + 1}: "
        if self._reading.on_error == "skip":
            self.list_skipped(self._source.name, f"{line}{fault.why}")
            self.places.update(np.int64(self._base_bytes + fault.at).tobytes())
            return
        why = f"{line}{fault.why}: {fault.remedy}"
        if self._source.is_optional:
            raise FileFault(why)
        raise DataError(
            f"cannot use {self._source.name} as text: {why}; set on_error: skip to leave out unreadable texts"
        )

    def _check_lengths(self, path: str, starts: NDArray[np.int64], dropped: NDArray[np.bool_]) -> dict[int, int]:
        """Mark texts that are too long as dropped.

        Return the end of each text that is followed by more than 1 MiB of blank lines, by the index of the text.
        """
        ends: dict[int, int] = {}
        if self._source.layout.format in _CONVERTED or self._is_document():
            return ends
        limit_bytes = self._reading.max_text_bytes
        for number in np.flatnonzero(np.diff(starts) > min(_LONG_BYTES, limit_bytes)).tolist():
            if dropped[number]:
                continue
            begin, following = int(starts[number]), int(starts[number + 1])
            end, num_bytes = _end_of_text(path, begin, following, _WHITE[self._source.layout.unit])
            if num_bytes > limit_bytes:
                line = _line_of(path, begin) - self._num_lines if self._is_shown() else None
                self._meet(too_long(begin, num_bytes, limit_bytes, line))
                dropped[number] = True
            elif following - end > _LONG_BYTES:
                ends[number] = end
        return ends

    def _is_shown(self) -> bool:
        """Return whether the next fault will be listed, so that determining its line is worth the time."""
        return self._reading.on_error == "stop" or len(self.skipped) < MOST_SKIPPED_LISTED

    def _is_document(self) -> bool:
        return self._source.layout.format == "text" and self._source.layout.unit == "document"

    def _write(
        self, path: str, starts: NDArray[np.int64], dropped: NDArray[np.bool_], codes: NDArray[np.uint32] | None
    ) -> None:
        """Write the beginnings and classes of all texts but the last, which may extend into the next part."""
        ends = self._check_lengths(path, starts, dropped)
        kept: Any = ~dropped[:-1] if dropped[:-1].any() else slice(None)
        if ends or not isinstance(kept, slice):
            self._write_gaps(starts, dropped, ends)
        begins = starts[:-1][kept] + self._base_bytes
        self._begins.write(begins.data)
        if codes is not None and self._reading.label is not None:
            self._codes.write(codes[:-1][kept].data)
            self._last_codes = codes[-1:]
        self._num_texts += len(begins)
        self._starts, self._is_dropped = starts[-1:], dropped[-1:]

    def _write_gaps(self, starts: NDArray[np.int64], dropped: NDArray[np.bool_], ends: dict[int, int]) -> None:
        """Write the ends of texts that are followed by skipped bytes."""
        numbers = self._num_texts + np.cumsum(~dropped[:-1]) - 1  # of each text, or of the last kept text before it
        gaps = {int(numbers[row]): end for row, end in ends.items()}
        for row in np.flatnonzero(dropped[:-1]).tolist():
            gaps.setdefault(int(numbers[row]), int(starts[row]))
        for number, end in sorted(gaps.items()):
            if number >= self._first_text and number > self._last_gap:
                self._gaps.write(np.array([number, self._base_bytes + end], np.int64).tobytes())
                self._last_gap = number
                self._num_gaps += 1

    def _numbered(self, labels: Labels) -> NDArray[np.uint32]:
        """Return the class codes of a part, numbered in the order in which the class names first occur in all files."""
        numbers = [self._names.setdefault(name, len(self._names)) for name in labels.names]
        if len(self._names) > MOST_LABELS:
            raise DataError(
                f"the column {self._reading.label!r} of {self._source.name} holds more than {MOST_LABELS} classes, for "
                f"example {listed([str(name) for name in list(self._names)[:3]])}: give the column of the classes"
            )
        return np.array([*numbers, 0], np.uint32)[labels.codes]

    def _sort_labels(self) -> list[str]:
        """Renumber the classes in the order of their names, and store the numbers in the smallest unsigned type."""
        names = sorted_names(list(self._names))
        if self._reading.label is None:
            self._codes.close()
            os.unlink(self._folder / LABELS_FILE)
            return []
        places = {name: number for number, name in enumerate(names)}
        new = np.array([places[str(name)] for name in self._names], np.min_scalar_type(max(len(names) - 1, 0)))
        self._codes.seek(0)
        temporary = self._folder / "labels.sorted"
        with temporary.open("wb") as file:
            while len(codes := np.fromfile(self._codes, np.uint32, _CODES_AT_ONCE)):
                file.write(new[codes].data)
        temporary.replace(self._folder / LABELS_FILE)
        return names


def _later(fault: Fault, num_lines: int) -> Fault:
    """Return a fault with its line counted from the beginning of the next part."""
    return fault if fault.line is None else fault._replace(line=fault.line - num_lines)


def sorted_names(names: list[Any]) -> list[str]:
    """Return the names of classes in order: by value if all are numbers, else alphabetically."""
    texts = sorted({str(name) for name in names})
    return sorted(texts, key=int) if all(text.lstrip("-").isdecimal() for text in texts) else texts


def _line_of(path: str, place: int) -> int:
    """Return the line of the byte at offset ``place`` in a file, counted from 0."""
    num_lines, step_bytes = 0, 1 << 20
    with opened(path) as descriptor:
        for begin in range(0, place, step_bytes):
            num_lines += os.pread(descriptor, min(step_bytes, place - begin), begin).count(b"\n")
    return num_lines


def _end_of_text(path: str, begin: int, following: int, white: bytes) -> tuple[int, int]:
    """Return the end of a text (its newline) that is followed by blank lines, and the length of the text in bytes."""
    step_bytes = 64 << 10
    end = following
    with opened(path) as descriptor:
        while end > begin:
            start = max(end - step_bytes, begin)
            kept = len(os.pread(descriptor, end - start, start).rstrip(white))
            if kept:
                tail = os.pread(descriptor, step_bytes, start + kept)
                line_rest, newline, _ = tail[: following - start - kept].partition(b"\n")
                text_end = start + kept + len(line_rest.removesuffix(b"\r"))
                return (start + kept + len(line_rest) if newline else following), text_end - begin
            end = start
    return begin, 0
