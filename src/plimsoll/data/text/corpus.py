"""Random access to the texts of indexed files: one ``pread`` per text, and runs of 256 KiB for consecutive texts.

No texts are cached, and at most 64 files are open, so the private memory of a process does not grow. Forked processes
do not share a file position. With `Corpus.with_blocks`, a corpus caches blocks of consecutive texts, so that an order
shuffled in blocks reads each block once, contiguously. A change of a file's content is detected by its size and time,
or if its text no longer decodes.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats import Layout
from plimsoll.data.formats.tagged import KEPT
from plimsoll.data.text.blocks import Blocks
from plimsoll.data.text.index_rows import BEGINS_FILE, GAPS_FILE, LABELS_FILE
from plimsoll.data.text.opened_files import OpenFiles
from plimsoll.data.text.scan import format_named
from plimsoll.errors import DataError
from plimsoll.files.checksums import discard, require_whole
from plimsoll.files.store import Facts, read_facts

_RUN_BYTES, _RUN_TEXTS = 256 << 10, 1 << 16
_SLICE_BYTES = 32 << 10
_PIECE_BYTES = 64 << 10
_BLOCK_BYTES = 64 << 10
_WORD_BORDER = re.compile(rb"\S(?= )")
_BORDER_WINDOW_BYTES = 4 << 10


class Corpus:
    """The texts of some files, by index. It is picklable: unpickling maps the index again.

    Reading keeps files open: give each thread a corpus of its own. Forked processes may share one.

    Attributes:
        folder: the store that holds the index.
        num_bytes: the size of all texts, line ends and quoting included, as stored in their files or, if converted, in
            the store.
        key: a hash of the content, independent of the location of the files: equal files read by the same rules have
            equal keys.
        skipped: the first 100 rows and files that were left out, with the reason; ``num_skipped`` is their total
            number.
        num_hidden: the number of hidden files and folders that were found and not read; 0 if only the index was opened.
        left_out: the files that contain no text.
        label_names: the names of the classes, if a label column was requested.
        labels: the class index of each text (memory-mapped); ``None`` if no label column was requested.
        tag_counts: the number of occurrences of each tag, in the order of the names, if words have tags.
    """

    def __init__(self, folder: Path, facts: Facts, cache_bytes: int = 0) -> None:
        self.folder, self._facts = folder, facts
        self._paths: list[str] = facts["paths"]
        self._layouts = [Layout(*fields) for fields in facts["layouts"]]
        self._layout_numbers: list[int] = facts["layout_numbers"]
        self._first_texts = np.concatenate(([0], np.cumsum(facts["num_texts"], dtype=np.int64)))
        self._file_ends = np.cumsum(facts["sizes"], dtype=np.int64)
        require_whole(folder)
        self._begins: NDArray[np.int64] = np.asarray(np.memmap(folder / BEGINS_FILE, np.int64, "r"))
        self._gaps = _mapped(folder / GAPS_FILE, np.int64).reshape(-1, 2)
        self._files = OpenFiles(facts, is_random=cache_bytes > 0)
        self.num_bytes: int = self._taken_bytes()
        self.key: str = facts["key"]
        self.skipped: tuple[str, ...] = tuple(facts["skipped"])
        self.num_skipped: int = facts["num_skipped"]
        self.num_hidden: int = facts.get("num_hidden", 0)
        self.left_out: tuple[Path, ...] = tuple(map(Path, facts["left_out"]))
        self.label_names: tuple[str, ...] = tuple(facts["label_names"])
        self.tag_counts: dict[str, int] = facts.get("tags", {})
        self.labels: NDArray[Any] | None = None
        if self.label_names:
            self.labels = _mapped(folder / LABELS_FILE, np.min_scalar_type(len(self.label_names) - 1))
        self._blocks = Blocks(self, cache_bytes) if cache_bytes else None

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, number: int) -> str:
        number = range(len(self))[number]  # negative numbers count from the end; IndexError beyond
        file, begin, end = self._span(number)
        return self._decoded(file, [self._read(file, begin, end)])[0]

    def __iter__(self) -> Iterator[str]:
        for file, first, last in self._runs(0, len(self)):
            yield from self._run(file, first, last)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_index, (self.folder, self._blocks.cache_bytes if self._blocks else 0)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold at least one text, in order. Converted files have their original names."""
        return tuple(map(Path, self._paths))

    @property
    def num_texts_of_paths(self) -> NDArray[np.int64]:
        """The number of texts in each file of `paths` (int64)."""
        return np.diff(self._first_texts)

    def texts(self, ids: NDArray[np.int64]) -> list[str]:
        """Return texts by their indices. Consecutive texts are read at once.

        Args:
            ids: the indices of the texts (B,), int64.

        Raises:
            IndexError: if an index is negative or too large.
            DataError: if a file has changed since it was indexed.
        """
        ids = np.asarray(ids, np.int64)
        if not len(ids):
            return []
        if ids.min() < 0 or ids.max() >= len(self):
            raise IndexError(f"texts are numbered from 0 to {len(self) - 1}, not {ids.min()} to {ids.max()}")
        if self._blocks is None and len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1 and (np.diff(ids) == 1).all():
            return self.read_range(int(ids[0]), int(ids[-1]) + 1)
        return self._scattered(ids)

    def read_range(self, first: int, last: int) -> list[str]:
        """Return the consecutive texts ``first`` to ``last - 1``, read in runs of 256 KiB."""
        texts: list[str] = []
        for run in self._runs(first, last):
            texts += self._run(*run)
        return texts

    def raw_runs(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of consecutive texts in runs, with the offset of each run in all files laid end to end."""
        for file, begin, end in self._runs(first, last):
            place = int(self._begins[begin])
            yield place, self._read(file, place, self._span(end - 1)[2])

    def _scattered(self, ids: NDArray[np.int64]) -> list[str]:
        """Return texts by their indices, each read separately or taken from its cached block."""
        begins, ends, files = self._spans(ids)
        if files is None:
            return self._decoded(0, self._raws(0, ids, begins, ends))
        texts = [""] * len(ids)
        order = np.argsort(files, kind="stable")
        for some in np.split(order, np.flatnonzero(np.diff(files[order])) + 1):
            file = int(files[some[0]])
            raws = self._raws(file, ids[some], begins[some], ends[some])
            for place, text in zip(some.tolist(), self._decoded(file, raws), strict=True):
                texts[place] = text
        return texts

    def _raws(
        self, file: int, ids: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[bytes]:
        if self._blocks is not None:
            return self._blocks.raws(ids, begins, ends)
        base = int(self._file_ends[file - 1]) if file else 0
        return self._files.read_many(file, begins - base, ends - begins)

    def announce(self, first: int, last: int) -> None:
        """Tell the operating system to start reading consecutive texts that are requested soon."""
        for file, begin, end in self._runs(first, last):
            base = int(self._file_ends[file - 1]) if file else 0
            start = int(self._begins[begin])
            os.posix_fadvise(
                self._files.descriptor(file), start - base, self._span(end - 1)[2] - start, os.POSIX_FADV_WILLNEED
            )

    def byte_lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of texts in their files in bytes (B,), with line ends and quoting."""
        begins, ends, _ = self._spans(np.asarray(ids, np.int64))
        return ends - begins

    def with_blocks(self, cache_bytes: int = 32 << 20) -> Corpus:
        """Return a corpus that caches whole blocks of texts, up to ``cache_bytes`` bytes.

        A block is `texts_per_block` consecutive texts, about 64 KiB, read at once. Use such a corpus for orders that
        take texts from few blocks at a time. With any other order it reads far too much.
        """
        return Corpus(self.folder, self._facts, cache_bytes)

    @property
    def texts_per_block(self) -> int:
        """The number of consecutive texts in a block of about 64 KiB."""
        return max(1, round(_BLOCK_BYTES * len(self) / self.num_bytes))

    def tagged(self, first_text: int = 0) -> Iterator[str]:
        """Yield the texts in order with the tags of their words; see `plimsoll.data.formats.tagged.words_and_tags`."""
        assert self.tag_counts, self.paths
        for file, first, last in self._runs(first_text, len(self)):
            yield from self._run(file, first, last, with_tags=True)

    def pieces(self, first_text: int = 0) -> Iterator[tuple[str, bool]]:
        """Yield the texts in order as pieces of at most 64 KiB, each with True for the last piece of a text.

        A piece ends before a space that follows a visible character, if its last 4 KiB contain one. Common
        pre-tokenizers (byte-level BPE from GPT-2 to Llama 3, WordPiece) never make a token from both sides of such a
        cut. So the tokens of the pieces are the tokens of the text. Tokens can differ at a cut in texts without such
        spaces. They can also differ with SentencePiece-like tokenizers that put a space before each input: about one
        token in 16,000.
        """
        for file, first, last in self._runs(first_text, len(self)):
            _, begin, end = self._span(first)
            if last - first == 1 and end - begin > _PIECE_BYTES and self._is_document(file):
                yield from self._pieces_of_document(file, begin, end)
                continue
            for text in self._run(file, first, last):
                if len(text) * 4 <= _PIECE_BYTES:
                    yield text, True
                else:
                    yield from _cut(text.encode("utf-8"))

    def sample(self, max_bytes: int) -> Iterator[str]:
        """Yield texts of about ``max_bytes`` bytes at most: all texts, or the texts in evenly spaced slices of 32 KiB.

        A document of plain text is cut to its part in the slice. Other texts are taken whole if they begin in the
        slice. A character cut at the edge of a slice is left out.
        """
        total_bytes = int(self._begins[-1])
        num_slices = min(-(-total_bytes // _SLICE_BYTES), max(max_bytes // _SLICE_BYTES, 1))
        places = [number * total_bytes // num_slices for number in range(num_slices + 1)]
        for begin, following in pairwise(places):
            yield from self._texts_at(begin, min(begin + _SLICE_BYTES, following))

    def _texts_at(self, begin: int, end: int) -> Iterator[str]:
        """Yield the texts that begin in a range of all files laid end to end. Documents are cut to the range."""
        first, last = (int(number) for number in np.searchsorted(self._begins, [begin, end]))
        if first and self._is_document(self._file_of(first - 1)):
            first -= 1  # this document began before the range
        for number in range(first, min(last, len(self))):
            file, text_begin, text_end = self._span(number)
            if self._is_document(file):
                text_begin, text_end = max(text_begin, begin), min(text_end, end)
                if text := self._read(file, text_begin, max(text_end, text_begin)).decode("utf-8", "ignore"):
                    yield text
            else:
                yield self[number]

    def _is_document(self, file: int) -> bool:
        layout = self._layouts[self._layout_numbers[file]]
        return layout.format == "text" and layout.unit == "document"

    def _taken_bytes(self) -> int:
        spanned_bytes = self._file_ends - self._begins[self._first_texts[:-1]]
        numbers, ends = self._gaps[:, 0], self._gaps[:, 1]
        following = np.minimum(self._begins[numbers + 1], self._file_ends[self._files_of(numbers)])
        return int(spanned_bytes.sum() - (following - ends).sum())

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._first_texts, number, "right")) - 1

    def _files_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first_texts, ids, "right") - 1

    def _span(self, number: int) -> tuple[int, int, int]:
        """Return the file index of a text, and the begin and end of the text in all files laid end to end."""
        file = self._file_of(number) if len(self._paths) > 1 else 0
        begin, end = int(self._begins[number]), min(int(self._begins[number + 1]), int(self._file_ends[file]))
        if len(self._gaps):
            gap = int(np.searchsorted(self._gaps[:, 0], number))
            if gap < len(self._gaps) and self._gaps[gap, 0] == number:
                end = int(self._gaps[gap, 1])
        return file, begin, end

    def _spans(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the spans of texts in all files laid end to end, and their file indices (``None``: one file only)."""
        begins, ends, files = self._begins[ids], self._begins[ids + 1], None
        if len(self._paths) > 1:
            files = self._files_of(ids)
            ends = np.minimum(ends, self._file_ends[files])
        if len(self._gaps):
            gaps = np.minimum(np.searchsorted(self._gaps[:, 0], ids), len(self._gaps) - 1)
            ends = np.where(self._gaps[gaps, 0] == ids, self._gaps[gaps, 1], ends)
        return begins, ends, files

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Split a range of texts into contiguous runs (file, first, last) of 256 KiB, or of one longer text."""
        while first < last:
            file = self._file_of(first)
            stop = min(last, int(self._first_texts[file + 1]), first + _RUN_TEXTS)
            gap = int(np.searchsorted(self._gaps[:, 0], first))
            if gap < len(self._gaps):
                stop = min(stop, int(self._gaps[gap, 0]) + 1)
            fitting = (
                int(np.searchsorted(self._begins[first : stop + 1], self._begins[first] + _RUN_BYTES, "right")) - 1
            )
            stop = min(stop, first + max(fitting, 1))
            yield file, first, stop
            first = stop

    def _run(self, file: int, first: int, last: int, with_tags: bool = False) -> list[str]:
        begin, end = int(self._begins[first]), self._span(last - 1)[2]
        raw = self._read(file, begin, end)
        borders = np.minimum(self._begins[first : last + 1] - begin, len(raw))
        layout = self._layouts[self._layout_numbers[file]]
        layout = layout._replace(label=KEPT) if with_tags else layout
        try:
            return format_named(layout.format).decode_run(raw, borders, layout)
        except ValueError as error:
            raise self._changed(file, error) from None

    def _decoded(self, file: int, raws: list[bytes]) -> list[str]:
        layout = self._layouts[self._layout_numbers[file]]
        try:
            return format_named(layout.format).decode(raws, layout)
        except ValueError as error:
            raise self._changed(file, error) from None

    def _changed(self, file: int, error: ValueError) -> DataError:
        """Return the error for a text that has changed since it was indexed; discard the index and converted file."""
        discard(self.folder)
        if str(file) in self._facts["stored"]:
            discard(Path(self._facts["stored"][str(file)]).parent)
        return DataError(
            f"{self._paths[file]} is no longer the text that was indexed ({error}): start again to index it anew"
        )

    def _read(self, file: int, begin: int, end: int) -> bytes:
        return self._files.read(file, begin - (int(self._file_ends[file - 1]) if file else 0), end - begin)

    def _pieces_of_document(self, file: int, begin: int, end: int) -> Iterator[tuple[str, bool]]:
        while begin < end:
            raw = self._read(file, begin, min(end, begin + _PIECE_BYTES))
            if begin + len(raw) < end:
                raw = raw[: _last_border(raw)]
            begin += len(raw)
            yield self._decoded(file, [raw])[0], begin == end


def open_index(folder: Path, cache_bytes: int = 0) -> Corpus:
    """Open a corpus from its index, as unpickling does.

    Args:
        folder: the store that holds the index.
        cache_bytes: the maximum size of cached blocks in bytes; 0 for no cache.

    Raises:
        DataError: if the index is missing or damaged.
    """
    facts = read_facts(folder)
    if facts is None:
        raise DataError(f"the index {folder} is missing or damaged: open the corpus from its files again")
    return Corpus(folder, facts, cache_bytes)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def _cut(raw: bytes) -> Iterator[tuple[str, bool]]:
    """Split a text into pieces of at most 64 KiB."""
    while len(raw) > _PIECE_BYTES:
        border = _last_border(raw[:_PIECE_BYTES])
        yield raw[:border].decode("utf-8"), False
        raw = raw[border:]
    yield raw.decode("utf-8"), True


def _last_border(raw: bytes) -> int:
    """Return the length to which to cut a part of a text: up to the last word, or else the last whole character."""
    borders = [match.end() for match in _WORD_BORDER.finditer(raw, max(len(raw) - _BORDER_WINDOW_BYTES, 0))]
    return borders[-1] if borders else codecs.utf_8_decode(raw, "strict", False)[1]
