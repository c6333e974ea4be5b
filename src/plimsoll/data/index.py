"""Random access to the texts of files that are larger than memory, through an index on disk.

Every file is read once, in chunks: checked for UTF-8, hashed, and split into texts whose byte offsets go to the index
(16 bytes per text, memory-mapped). Texts stay where they are; reading one is one ``pread``. The index belongs to the
paths, sizes and modification times of the files: where one differs, a new index is built. Memory: some 150 bytes per
file, nothing per text. It does NOT notice a file that changes while it is used, unless its text no longer decodes.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Format, Unit, text
from plimsoll.data.sources import SourceFile, find_files
from plimsoll.data.store import Facts, read_facts, stored
from plimsoll.errors import DataError

_FORMAT: Format = text
_CHUNK_BYTES = 256 << 10  # fits the L2 cache; 16 MiB chunks were 25 % slower
_ROWS_PER_READ = 4096
_SLICE_BYTES = 32 << 10
_PIECE_BYTES = 64 << 10
_WORD_BORDER = re.compile(rb"\S(?= )")
_BORDER_WINDOW_BYTES = 4 << 10
_ROWS_FILE = "rows.bin"


class Progress(Protocol):
    """Told how far a stage is: ``done`` of ``total`` bytes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class Corpus:
    """The texts of some files, by number; picklable (the index is mapped again on the other side).

    Reading keeps the last file open: give every thread a corpus of its own.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self._folder = folder
        self._paths: list[str] = facts["paths"]
        self._first_rows = np.concatenate(([0], np.cumsum(facts["num_texts"], dtype=np.int64)))
        self._rows = np.memmap(folder / _ROWS_FILE, np.int64, "r").reshape(-1, 2)
        self._open: tuple[str, _OpenFile] | None = None
        self.num_bytes: int = facts["num_bytes"]
        self.key: str = facts["key"]
        self.skipped: tuple[str, ...] = tuple(facts["skipped"])
        self.left_out: tuple[Path, ...] = tuple(map(Path, facts.get("left_out", ())))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> str:
        number = range(len(self))[number]  # negative numbers count from the end; IndexError beyond
        pieces = self._read_pieces(self._paths[self._file_of(number)], *self._rows[number].tolist())
        return "".join(piece for piece, _ in pieces)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_index, (self._folder,)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold at least one text, in order."""
        return tuple(map(Path, self._paths))

    @property
    def num_texts_of_paths(self) -> NDArray[np.int64]:
        """How many texts each of `paths` holds."""
        return np.diff(self._first_rows)

    def source_of(self, number: int) -> Path:
        """Return the file that text ``number`` is in."""
        return Path(self._paths[self._file_of(range(len(self))[number])])

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield all texts in order, cut into pieces of at most 64 KiB, each with whether it is the last of its text.

        A piece ends before a space that follows a visible character, where there is one in its last 4 KiB. No common
        pre-tokenizer (byte-level BPE from GPT-2 to Llama 3, WordPiece) joins the two sides of such a place, so the
        tokens of the pieces are the tokens of the text. They can differ at a cut for texts without such spaces, and for
        SentencePiece-like tokenizers that put a space before whatever they are given: about one token in 16,000.
        """
        for path, (first, last) in zip(self._paths, pairwise(self._first_rows.tolist()), strict=True):
            for begin in range(first, last, _ROWS_PER_READ):
                for start, end in self._rows[begin : min(begin + _ROWS_PER_READ, last)].tolist():
                    yield from self._read_pieces(path, start, end)

    def sample(self, max_bytes: int) -> Iterator[str]:
        """Yield at most ``max_bytes`` of the texts: all of them, or slices of 32 KiB from evenly spaced places.

        A slice runs on into the next texts, each a string of its own; a character cut by a border is left out.
        """
        num_slices = min(-(-self.num_bytes // _SLICE_BYTES), max_bytes // _SLICE_BYTES)
        begins = [number * self.num_bytes // num_slices for number in range(num_slices)]
        for begin, next_begin, (number, offset) in zip(
            begins, [*begins[1:], self.num_bytes], self._places(begins), strict=True
        ):
            yield from self._read_on(number, offset, min(_SLICE_BYTES, next_begin - begin))

    def _places(self, positions: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (text number, byte offset in it) for ascending positions in all texts laid end to end."""
        waiting = deque(positions)
        begin = 0
        for first in range(0, len(self), _ROWS_PER_READ):
            rows = self._rows[first : first + _ROWS_PER_READ]
            ends = begin + np.cumsum(rows[:, 1] - rows[:, 0])
            while waiting and waiting[0] < ends[-1]:
                row = int(np.searchsorted(ends, waiting[0], "right"))
                yield first + row, waiting.popleft() - (int(ends[row - 1]) if row else begin)
            begin = int(ends[-1])

    def _read_on(self, number: int, offset: int, num_bytes: int) -> Iterator[str]:
        while num_bytes > 0:
            start, end = self._rows[number].tolist()
            raw = self._read(self._paths[self._file_of(number)], start + offset, min(end, start + offset + num_bytes))
            yield raw.decode("utf-8", "ignore")
            number, offset, num_bytes = number + 1, 0, num_bytes - len(raw)

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._first_rows, number, "right")) - 1

    def _read_pieces(self, path: str, start: int, end: int) -> Iterator[tuple[str, bool]]:
        while start < end:
            raw = self._read(path, start, min(end, start + _PIECE_BYTES))
            if start + len(raw) < end:
                raw = raw[: _last_border(raw)]
            start += len(raw)
            yield _decoded(raw, path), start == end

    def _read(self, path: str, start: int, end: int) -> bytes:
        if self._open is None or self._open[0] != path:
            self._open = (path, _OpenFile(path))
        raw = os.pread(self._open[1].descriptor, end - start, start)
        if len(raw) < end - start:
            raise DataError(
                f"{path} ends before byte {end}, but was longer when it was indexed: start again to index it anew"
            )
        return raw


class _OpenFile:
    """A descriptor that is closed with the object."""

    def __init__(self, path: str) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}): put it back, or allow reading it") from None
        weakref.finalize(self, os.close, self.descriptor)


def open_corpus(sources: tuple[str, ...], unit: Unit, cache: Path, progress: Progress = silent) -> Corpus:
    """Open the texts of files, folders and globs; the first time, or when a file has changed, index them.

    Args:
        sources: paths; what each may be is said in `plimsoll.data.sources`.
        unit: ``"document"``: a text is a file; ``"line"``: a text is a line. Texts of zero bytes are left out.
        cache: the folder for the index; made if missing.
        progress: called with the stage ``"index"``.

    Raises:
        DataError: if a source is missing, nothing but white space is found, or a file named in ``sources`` is not UTF-8
            text. Such a file found in a folder or by a glob is left out and listed in `Corpus.skipped`.
        OutputError: if the index cannot be written.
    """
    files = find_files(sources)
    identity = [unit, *((file.path, file.num_bytes, file.mtime_ns, file.named) for file in files)]
    folder = cache / f"index-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"
    facts = stored(folder, partial(_write_index, sources=sources, files=files, unit=unit, progress=progress))
    return Corpus(folder, facts)


def _open_index(folder: Path) -> Corpus:
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"the index {folder} is gone or torn: open the corpus from its files again")
    return Corpus(folder, facts)


def _write_index(
    folder: Path, sources: tuple[str, ...], files: list[SourceFile], unit: Unit, progress: Progress
) -> Facts:
    paths, num_texts, skipped, left_out = [], [], [], []
    content, num_bytes, blank = hashlib.sha256(unit.encode()), 0, True
    report = _Report(progress, sum(file.num_bytes for file in files))
    with (folder / _ROWS_FILE).open("wb") as rows:
        for file in files:
            reading = _Reading(file.path, report)
            try:
                added_texts, added_bytes = _append_rows(rows, reading.chunks(), unit)
            except DataError as error:
                if file.named:
                    raise DataError(f"cannot use {file.path} as text: {error}") from None
                skipped.append(f"{file.path}: {error}")
                left_out.append(file.path)
                continue
            if not added_texts:
                left_out.append(file.path)
            else:
                paths.append(file.path)
                num_texts.append(added_texts)
                num_bytes += added_bytes
                content.update(reading.digest.digest())
                blank = blank and reading.blank
    if blank:
        raise DataError(_no_text(sources, files, skipped))
    return {
        "paths": paths,
        "num_texts": num_texts,
        "num_bytes": num_bytes,
        "skipped": skipped,
        "left_out": left_out,
        "key": content.hexdigest()[:32],
    }


class _Report:
    """Adds up the bytes read and passes them on."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total_bytes, self._done_bytes = progress, total_bytes, 0

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress("index", self._done_bytes, self._total_bytes)


class _Reading:
    """One file in chunks, hashed and looked at on their way."""

    def __init__(self, path: str, report: _Report) -> None:
        self._path, self._report = path, report
        self.digest = hashlib.sha256()
        self.blank = True

    def chunks(self) -> Iterator[bytes]:
        file = _OpenFile(self._path)
        while chunk := os.read(file.descriptor, _CHUNK_BYTES):
            self.digest.update(chunk)
            self.blank = self.blank and chunk.isspace()
            self._report.add(len(chunk))
            yield chunk


def _append_rows(rows: BinaryIO, chunks: Iterable[bytes], unit: Unit) -> tuple[int, int]:
    """Write the spans of one file, or nothing if it is faulty; return how many texts and bytes they are."""
    begin, num_texts, num_bytes = rows.tell(), 0, 0
    try:
        for spans in _FORMAT.spans(chunks, unit):
            rows.write(spans.tobytes())
            num_texts += len(spans)
            num_bytes += int((spans[:, 1] - spans[:, 0]).sum())
    except DataError:
        rows.seek(begin)
        rows.truncate()
        raise
    return num_texts, num_bytes


def _no_text(sources: tuple[str, ...], files: list[SourceFile], skipped: list[str]) -> str:
    where = ", ".join(sources)
    if len(skipped) == len(files):
        which = "the only file" if len(files) == 1 else f"none of the {len(files)} files"
        negated = " not" if len(files) == 1 else ""
        return f"{which} of {where} is{negated} UTF-8 text, the first: {skipped[0]}"
    num_texts = len(files) - len(skipped)
    which = f"the only text file of {where} holds" if num_texts == 1 else f"the {num_texts} text files of {where} hold"
    return f"{which} nothing but white space: give files with text"


def _last_border(raw: bytes) -> int:
    """Return where to cut a part of a longer text: at the last word, or else at the last whole character."""
    borders = [match.end() for match in _WORD_BORDER.finditer(raw, max(len(raw) - _BORDER_WINDOW_BYTES, 0))]
    return borders[-1] if borders else codecs.utf_8_decode(raw, "strict", False)[1]


def _decoded(raw: bytes, path: str) -> str:
    try:
        return _FORMAT.decode(raw)
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not the UTF-8 text it was when it was indexed: start again to index it anew"
        ) from None
