"""Word vectors as lines of text: a word, then the values of its vector, each after a space (or a tab).

Only ``\\n`` ends a line: words may contain U+0085, U+2028 or ``\\r``. A line is read from the right: the last
``dimension`` fields are the vector, and everything before them is the word, which may contain spaces.

Lines of unwanted words, usually most lines, are not parsed. One pass over the bytes finds the starts of lines. The
first eight bytes of each line are compared with the wanted words, and only matching lines are extracted. Of these, only
lines of wanted words are parsed.

Numbers are rounded as by ``numpy.float32(text)``: to double precision, then to single precision.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from plimsoll.embeddings.formats import Block, Fault, Rows, rows_of
from plimsoll.embeddings.formats.helpers.blocks import as_set, not_utf8
from plimsoll.embeddings.formats.helpers.sources import HEAD_BYTES, Source
from plimsoll.errors import EmbeddingError

NEWLINE, SPACE, TAB = 10, 32, 9
MAX_LINE_BYTES = 16 << 20
_PART_BYTES = 1 << 20
_MORE_BYTES = 64 << 10
_LOOKED_AT_LINES = 64
_WHITE = b" \t\r"
_IS_WHITE = np.isin(np.arange(256), [*_WHITE])
_HASH_BITS = 20
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing, Knuth, The Art of Computer Programming 3, 6.4
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_HEAD_BYTES = 8
_SHOWN_BYTES = 40


class Layout(NamedTuple):
    """The facts needed to read the lines of a file.

    Attributes:
        dimension: the number of values per vector.
        separator: the byte before each value: a space or a tab.
        header_bytes: the offset of the first line with a word.
        first_number: the line number of that line in the file, from 1.
        num_promised: the number of words according to the header; ``None`` without a header.
    """

    dimension: int
    separator: int
    header_bytes: int = 0
    first_number: int = 1
    num_promised: int | None = None


def separator_of(line: bytes) -> int:
    """Return the byte that separates the fields of a line: tab or space."""
    return TAB if line.count(b"\t") > line.count(b" ") else SPACE


def dimension_of(head: bytes) -> int:
    """Return the number of numeric fields at the end of most lines in ``head``; 0 if they are not lines of vectors.

    The last line is ignored because it may be incomplete, unless it is the only line and the whole file.
    """
    lines = head.split(b"\n")
    lines = lines[:-1] or lines[: len(head) < HEAD_BYTES]
    lines = [line for line in islice(lines, _LOOKED_AT_LINES) if line.strip()]
    if sum(b"  " in line.rstrip(_WHITE) for line in lines) * 2 > len(lines):
        return 0  # with several spaces between fields, only the last number would be the vector
    found = Counter(_num_numbers(line) for line in lines)
    return found.most_common(1)[0][0] if found else 0


def _num_numbers(line: bytes) -> int:
    fields = line.rstrip(_WHITE).split(bytes([separator_of(line)]))
    for number, field in enumerate(reversed(fields[1:])):
        if not is_number(field):
            return number
    return len(fields) - 1


def is_number(field: bytes) -> bool:
    """Return whether a field can be parsed as a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


class Lines:
    """Word vectors in lines of text, read in parts of complete lines."""

    counted = "line"

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._layout = source, layout
        self._share = 0.0
        self.dimension = layout.dimension
        self.num_promised = layout.num_promised
        self.first_number = layout.first_number
        num_bytes = 0 if source.packing else source.num_file_bytes - layout.header_bytes
        self.num_parts = -(-num_bytes // _PART_BYTES)

    def share_read(self) -> float:
        """Return the share of the file that the parts yielded so far cover; see `Vectors`."""
        return self._share

    def build(self, words: list[bytes]) -> None:
        """Return ``None``: text files cannot build vectors of other words."""

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield functions that read one part of the file each; see `Vectors`."""
        words = as_set(wanted)
        reading = _Reading(self._layout, None if words is None else _Wanted(words, self._layout.separator))
        return self._of_stream(reading) if self._source.packing else self._of_file(reading)

    def _of_file(self, reading: _Reading) -> Iterator[Callable[[], Block]]:
        size = self._source.num_file_bytes
        file = _File(self._source)
        for begin in range(self._layout.header_bytes, size, _PART_BYTES):
            end = min(begin + _PART_BYTES, size)
            self._share = end / size
            yield _PartOfFile(file, begin, end, reading)

    def _of_stream(self, reading: _Reading) -> Iterator[Callable[[], Block]]:
        carried: list[bytes] = []
        to_skip = self._layout.header_bytes
        for chunk, share in self._source.chunks():
            if to_skip:
                chunk, to_skip = chunk[to_skip:], max(to_skip - len(chunk), 0)  # noqa: PLW2901
            self._share = share
            end = chunk.rfind(b"\n") + 1
            if not end:
                carried.append(chunk)
                require_lines(sum(map(len, carried)), self._source.name)
                continue
            yield _PartOfStream([*carried, chunk[:end]], reading)
            carried = [chunk[end:]]
        self._share = 1.0
        if any(carried) or self._source.is_cut:
            yield _PartOfStream(carried, reading, is_cut=self._source.is_cut)


def require_lines(num_bytes: int, name: str) -> None:
    """Check that a line of ``num_bytes`` bytes is short enough to be a word with its vector.

    Raises:
        EmbeddingError: if the line is longer than `MAX_LINE_BYTES`.
    """
    if num_bytes > MAX_LINE_BYTES:
        raise EmbeddingError(
            f"{name} has a line of more than {MAX_LINE_BYTES >> 20} MiB, which is not a word with its vector: give a "
            "file of word vectors"
        )


class _Wanted:
    """The wanted words, and the first eight bytes that their lines would have."""

    def __init__(self, words: Collection[bytes], separator: int) -> None:
        self.words = words
        self.has_separator = any(separator in word for word in self.words)
        self._separator = np.uint64(separator)
        heads = b"".join([(word + bytes([separator])).ljust(_HEAD_BYTES, b"\0")[:_HEAD_BYTES] for word in self.words])
        self._heads = np.unique(self._cut(np.frombuffer(heads, "<u8")))
        self._may_be = np.zeros(1 << _HASH_BITS, np.bool_)
        self._may_be[_hashes(self._heads)] = True

    def are_likely(self, heads: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the indexes of the lines that may begin with a wanted word.

        ``heads`` are the first eight bytes of each line, as little-endian integers.
        """
        heads = self._cut(heads)
        likely = np.flatnonzero(self._may_be[_hashes(heads)])
        places = np.minimum(np.searchsorted(self._heads, heads[likely]), len(self._heads) - 1)
        is_head: NDArray[np.bool_] = self._heads[places] == heads[likely]
        return likely[is_head]

    def _cut(self, heads: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Set the bytes after the first separator to zero in each of ``heads``, the first eight bytes of lines.

        The separator is found as in Warren, Hacker's Delight, 6-1.
        """
        differences = heads ^ (_ONES * self._separator)
        zeros = (differences - _ONES) & ~differences & _TOPS
        lowest = zeros & (~zeros + np.uint64(1))
        return heads & ((lowest << np.uint64(1)) - np.uint64(1))


def _hashes(heads: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (heads * _HASH_FACTOR) >> np.uint64(64 - _HASH_BITS)


class _Buffers(threading.local):
    """The buffers of each thread: for the bytes of a part, and for a mask with one boolean per byte."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.is_newline = np.empty(0, np.bool_)

    def sized(self, num_bytes: int) -> bytearray:
        """Return this thread's buffer, enlarged to at least ``num_bytes`` bytes; its content is kept."""
        if len(self.raw) < num_bytes:
            self.raw.extend(bytes(num_bytes - len(self.raw)))
        return self.raw

    def mask(self, num_bytes: int) -> NDArray[np.bool_]:
        """Return this thread's buffer for the mask, with ``num_bytes`` booleans of arbitrary value."""
        if len(self.is_newline) < num_bytes:
            self.is_newline = np.empty(num_bytes, np.bool_)
        return self.is_newline[:num_bytes]


class _File:
    """An open file. It is closed when the last of its parts is freed."""

    def __init__(self, source: Source) -> None:
        self.name, self.buffers = source.name, _Buffers()
        with source.opened() as (file, _):
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def fill(self, place: int, at: int, num_bytes: int) -> int:
        """Read bytes from offset ``at`` into this thread's buffer at ``place``; return the number of bytes read."""
        # The view must be released: a bytearray cannot grow while a view of it exists.
        with memoryview(self.buffers.sized(place + num_bytes + _HEAD_BYTES)) as raw:
            done = 0
            while done < num_bytes:
                got = os.preadv(self._descriptor, [raw[place + done : place + num_bytes]], at + done)
                if not got:
                    break
                done += got
        return done


class _Reading(NamedTuple):
    """The layout of the lines, and the wanted words; ``None`` if all words are wanted."""

    layout: Layout
    wanted: _Wanted | None


@dataclass(frozen=True, slots=True)
class _PartOfFile:
    """The lines that start in the bytes ``begin`` to ``end`` of a file."""

    file: _File
    begin: int
    end: int
    reading: _Reading

    def __call__(self) -> Block:
        buffers = self.file.buffers
        is_first = self.begin == self.reading.layout.header_bytes
        num_bytes = self._read(self.begin - (not is_first))
        # The previous part reads the line that starts in it; raw[0] is the byte before this part.
        start = 0 if is_first else buffers.raw.find(b"\n", 0, num_bytes) + 1 or num_bytes
        return _block(buffers.raw, start, num_bytes, buffers.mask(num_bytes), self.reading)

    def _read(self, at: int) -> int:
        """Read from the offset ``at`` to the end of the last line that starts in this part; return the bytes read."""
        raw = self.file.buffers.sized(_PART_BYTES + _MORE_BYTES)
        num_bytes = self.file.fill(0, at, self.end - at)
        while raw[num_bytes - 1] != NEWLINE:
            more = self.file.fill(num_bytes, at + num_bytes, _MORE_BYTES)
            found = raw.find(b"\n", num_bytes, num_bytes + more) + 1
            num_bytes = found or num_bytes + more
            require_lines(num_bytes - _PART_BYTES, self.file.name)
            if not more:
                break
        return num_bytes


@dataclass(frozen=True, slots=True)
class _PartOfStream:
    """A part of a compressed file: lines whose bytes are the concatenated ``pieces``.

    If ``is_cut`` is true, the part is the incomplete last line of a truncated file, and is reported as a fault.
    """

    pieces: list[bytes]
    reading: _Reading
    is_cut: bool = False

    def __call__(self) -> Block:
        raw = b"".join([*self.pieces, bytes(_HEAD_BYTES)])
        num_bytes = len(raw) - _HEAD_BYTES
        if self.is_cut:  # not used even if no number is missing: the last may lack digits
            block = _cut([], np.empty(0, np.int64), self.reading)
            return block._replace(
                num_words=int(num_bytes > 0), faults=(Fault("truncated", 0, "the archive ends early"),)
            )
        return _block(raw, 0, num_bytes, np.empty(num_bytes, np.bool_), self.reading)


def _block(raw: bytes | bytearray, start: int, end: int, is_newline: NDArray[np.bool_], reading: _Reading) -> Block:
    """Make a block from the lines in ``raw[start:end]``. At least eight more bytes must follow in ``raw``.

    ``is_newline`` is a buffer with one boolean per byte up to ``end``, which is overwritten.
    """
    layout, wanted = reading
    view = np.frombuffer(raw, np.uint8, end)
    np.equal(view, NEWLINE, out=is_newline)
    ends = np.flatnonzero(is_newline[start:]) + start
    has_end = start == end or view[end - 1] == NEWLINE
    if not has_end:
        ends = np.append(ends, end)
    starts = np.concatenate((np.full(min(len(ends), 1), start), ends[:-1] + 1))
    np.equal(view, layout.separator, out=is_newline)
    faults = _wrong_lines(raw, is_newline, starts, ends, layout, has_end)
    places = np.arange(len(starts))
    if wanted is not None:
        heads: NDArray[np.uint64] = np.ndarray((end + 1,), "<u8", raw, strides=(1,))
        places = wanted.are_likely(heads[starts])
    with memoryview(raw) as memory:
        lines = [
            bytes(memory[begin:stop]).rstrip(_WHITE)
            for begin, stop in zip(starts[places].tolist(), ends[places].tolist(), strict=True)
        ]
    block = _cut(lines, places, reading)
    return block._replace(num_words=len(starts), faults=(*faults, *block.faults))


def _wrong_lines(  # noqa: PLR0917 -- private, one caller
    raw: bytes | bytearray,
    is_separator: NDArray[np.bool_],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    layout: Layout,
    has_end: bool,
) -> tuple[Fault, ...]:
    """Return the faults of lines with the wrong number of values.

    Only lines with an unexpected number of separators, or with several white bytes at the end, are split into fields.
    """
    if not len(starts):
        return ()
    # The smallest integer type that can hold the dimension is the fastest.
    kind = np.promote_types(np.min_scalar_type(layout.dimension), np.uint16)
    counts = np.add.reduceat(is_separator.view(np.uint8), starts, dtype=kind)
    counts -= is_separator[ends - 1] & (ends > starts)
    view = np.frombuffer(raw, np.uint8)
    is_odd = (counts != layout.dimension) | (_IS_WHITE[view[ends - 1]] & _IS_WHITE[view[ends - 2]])
    faults = []
    for place in np.flatnonzero(is_odd).tolist():
        line = bytes(raw[starts[place] : ends[place]]).rstrip(_WHITE)
        fields = line.split(bytes([layout.separator]))
        if len(fields) <= layout.dimension or _has_numbers(fields[: -layout.dimension]):
            is_torn = not has_end and place == len(starts) - 1 and len(fields) <= layout.dimension
            what = f"{_shown(line)}, {len(fields) - 1} numbers, not {layout.dimension}"
            faults.append(Fault("truncated" if is_torn else "dimension", place, what))
    return tuple(faults)


def _has_numbers(word: list[bytes]) -> bool:
    """Return whether all fields of a word after its first are numbers: the line then has too many values."""
    return len(word) > 1 and all(map(is_number, word[1:]))


def _shown(line: bytes) -> str:
    text = line[:_SHOWN_BYTES].decode("utf-8", "replace")
    return repr(text + ("..." if len(line) > _SHOWN_BYTES else ""))


def _cut(lines: list[bytes], places: NDArray[np.int64], reading: _Reading) -> Block:
    """Make a block from lines, without unwanted words and without lines with too few or too many values.

    ``places`` are the positions of the lines in the part.
    """
    layout, wanted = reading
    separator = bytes([layout.separator])
    if wanted is not None and not wanted.has_separator:
        is_likely = [line[: line.find(separator)] in wanted.words for line in lines]
        lines, places = list(compress(lines, is_likely)), places[np.array(is_likely, np.bool_)]
    fields = _Fields(lines, layout)
    words = fields.words()
    is_kept = [
        word is not None
        and (wanted is None or word in wanted.words)
        and not (separator in word and _has_numbers(word.split(separator)))
        for word in words
    ]
    bad = not_utf8([word or b"" for word in words]) if wanted is None else []  # wanted words are UTF-8
    bad = [index for index in bad if is_kept[index]]
    faults = tuple(Fault("utf-8", int(places[index]), _shown(lines[index])) for index in bad)
    for index in bad:
        is_kept[index] = False
    kept = np.flatnonzero(is_kept)
    return Block(
        [word for word in compress(words, is_kept) if word is not None],
        places[kept],
        len(lines),
        lambda indexes: fields.rows(kept[indexes]),
        faults,
    )


class _Fields:
    """The fields of concatenated lines.

    ``_ends`` are the offsets of the ends of all fields. ``_last[i]`` is the index of the last field of line i.
    """

    def __init__(self, lines: list[bytes], layout: Layout) -> None:
        self._layout = layout
        self._raw = b"\n".join([*lines, b""])
        self._view = np.frombuffer(self._raw, np.uint8)
        self._is_end = (self._view == layout.separator) | (self._view == NEWLINE)
        self._ends = np.flatnonzero(self._is_end)
        line_ends = np.cumsum([len(line) + 1 for line in lines], dtype=np.int64) - 1
        self._starts = np.concatenate(([0], line_ends + 1))
        self._last = np.searchsorted(self._ends, line_ends)

    def words(self) -> list[bytes | None]:
        """Return the word of each line; ``None`` for a line with too few fields."""
        first = self._last - self._layout.dimension  # the index of the word's last field
        is_long = first > np.concatenate(([-1], self._last[:-1]))[: len(first)]
        ends = self._ends[np.where(is_long, first, 0)] if len(first) else first
        return [
            self._raw[start:end] if is_word else None
            for start, end, is_word in zip(self._starts.tolist(), ends.tolist(), is_long.tolist(), strict=False)
        ]

    def rows(self, lines: NDArray[np.int64]) -> Rows:
        """Parse the vectors of the lines with the indexes ``lines``, which must have enough fields."""
        first = self._last[lines] - (self._layout.dimension - 1)
        try:
            return rows_of(self._parsed(first))
        except ValueError:  # errors of pyarrow are ValueErrors, too
            return self._one_by_one(first)

    def _parsed(self, first: NDArray[np.int64]) -> NDArray[np.float64]:
        """Parse vectors in one call of Arrow, which is faster than Python, but supports fewer forms of numbers.

        ``first`` has the index of each vector's first field.
        """
        import pyarrow
        from pyarrow import compute

        is_asked = np.zeros(len(self._ends), np.bool_)
        self._runs(is_asked)[first] = True
        offsets = np.zeros(len(self._ends) + 1, np.int32)
        offsets[1:] = self._ends - np.arange(len(self._ends))
        fields = pyarrow.StringArray.from_buffers(
            len(self._ends),
            pyarrow.py_buffer(offsets),
            pyarrow.py_buffer(self._view[~self._is_end]),
            pyarrow.py_buffer(np.packbits(is_asked, bitorder="little")),
        )
        # Arrow's default memory pool would retain tens of MiB.
        parsed = compute.cast(fields, pyarrow.float64(), memory_pool=pyarrow.system_memory_pool())
        doubles: NDArray[np.float64] = np.frombuffer(parsed.buffers()[1], np.float64, len(fields))
        return self._runs(doubles)[first]

    def _runs(self, fields: NDArray[Any]) -> NDArray[Any]:
        """Return a view of ``fields`` whose row i has ``dimension`` elements: element i and those after it."""
        return sliding_window_view(fields, self._layout.dimension, writeable=fields.flags.writeable)

    def _one_by_one(self, first: NDArray[np.int64]) -> Rows:
        values = np.zeros((len(first), self._layout.dimension))
        faults = []
        for number, field in enumerate(first.tolist()):
            last = field + self._layout.dimension - 1
            fields = self._raw[self._ends[field - 1] + 1 : self._ends[last]].split(bytes([self._layout.separator]))
            wrong = [text for text in fields if not is_number(text)]
            if wrong:
                faults.append(Fault("number", number, f"{_shown(wrong[0])} is not a number"))
            else:
                values[number] = [float(text) for text in fields]
        return rows_of(values, tuple(faults))
