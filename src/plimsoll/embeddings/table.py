"""A table of word vectors: one safetensors file, opened as a memory map.

Tensors: ``vectors`` (words, dimension) in float32 or float16; ``words``, the concatenated UTF-8 bytes of all words;
``word_ends``, the offset of each word's end in ``words``; ``found``, the source of each row's vector
(`plimsoll.embeddings.wanted`). Any program that reads safetensors can read it.

All offsets are known before the first vector is written. So a table is filled in place, in a mapped file, and needs no
memory that the kernel cannot reclaim.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.wanted import EXACT, PADDING
from plimsoll.errors import EmbeddingError

KIND = "plimsoll-embeddings"
Precision = Literal["float32", "float16"]
Access = Literal["read", "write", "copy"]
_ACCESS = {"read": mmap.ACCESS_READ, "write": mmap.ACCESS_WRITE, "copy": mmap.ACCESS_COPY}
_LENGTH_BYTES = 8
_RESERVED_BYTES = 1024  # for the header: enough for the longest one, and a multiple of the alignment
_NO_WORD = b"\xff"  # marks a row without a word; never occurs in UTF-8
_TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I64": np.int64}
_NAMES = {np.dtype(kind).name: name for name, kind in _TYPES.items()}


class Table(NamedTuple):
    """A table of word vectors in a mapped file, with its tensors as arrays; see the module."""

    path: Path
    vectors: NDArray[Any]
    found: NDArray[np.uint8]
    words: NDArray[np.uint8]
    word_ends: NDArray[np.int64]

    @property
    def padding(self) -> int | None:
        """The index of the padding row; ``None`` if the table has no padding row."""
        rows = np.flatnonzero(self.found == PADDING)
        return int(rows[0]) if len(rows) else None

    def texts(self) -> list[str | None]:
        """Return the word of each row; ``None`` for a row without a word. This creates a Python object per word."""
        return [None if raw == _NO_WORD else _text(raw) for raw in self.raw_words()]

    def raw_words(self) -> list[bytes]:
        """Return the word of each row as UTF-8 bytes; ``b"\\xff"`` for a row without a word."""
        raw, ends = self.words.tobytes(), self.word_ends.tolist()
        return [raw[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=bool(ends))]


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # the word was not UTF-8 in its file
        return raw.decode("utf-8", "surrogateescape")


def create_table(path: Path, words: Sequence[str | None], dimension: int, precision: Precision) -> Table:
    """Create the file of a table with these words, and map it for writing. All vectors are zero.

    Raises:
        OSError: if the disk is full. The disk space of the whole file is allocated here.
    """
    raw = [_NO_WORD if word is None else word.encode("utf-8", "surrogatepass") for word in words]
    ends = np.cumsum([0, *map(len, raw)], dtype=np.int64)[1:]
    shapes = _shapes(len(raw), sum(map(len, raw)), dimension, precision)
    head, num_bytes = _header(shapes)
    with path.open("wb+") as file:
        file.write(head)
        os.posix_fallocate(file.fileno(), 0, len(head) + num_bytes)
    table = open_table(path, "write")
    table.word_ends[:] = ends
    table.words[:] = np.frombuffer(b"".join(raw), np.uint8)
    return table


class TableWriter:
    """A context manager that writes a table whose number of words is not known in advance.

    Raises:
        OSError: if the disk is full.
    """

    def __init__(self, path: Path, dimension: int, precision: Precision) -> None:
        self._path, self._dimension, self._precision = path, dimension, precision
        self._words = bytearray()
        self._ends = array("q")

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._file.write(bytes(_RESERVED_BYTES))
        return self

    def add(self, words: Sequence[bytes], vectors: NDArray[np.float32]) -> None:
        """Add words with their vectors (words, dimension)."""
        for word in words:
            self._words += word
            self._ends.append(len(self._words))
        self._file.write(np.ascontiguousarray(vectors, self._precision).data)

    def __exit__(self, *_: object) -> None:
        with self._file as file:
            file.write(self._ends)
            file.write(bytes([EXACT]) * len(self._ends))
            file.write(self._words)
            file.seek(0)
            file.write(_header(_shapes(len(self._ends), len(self._words), self._dimension, self._precision))[0])


def open_table(path: Path, access: Access = "read") -> Table:
    """Map the file of a table.

    ``access`` is ``read``, ``write`` (changes are written to the file) or ``copy`` (changes stay in private memory).

    Raises:
        EmbeddingError: if the file is incomplete, or not a table of Plimsoll.
    """
    with path.open("rb+" if access == "write" else "rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=_ACCESS[access])
        except ValueError:
            raise EmbeddingError(f"{path} has 0 bytes: make it again") from None
    entries, begin = _read_header(mapped, path)
    try:
        table = Table(path, **{name: _view(mapped, begin, entry) for name, entry in entries.items()})
        num_rows, dimension = table.vectors.shape
    except (ValueError, TypeError, KeyError):
        num_rows, dimension = -1, 0
    if not dimension or {num_rows} != {len(table.found), len(table.word_ends)}:
        raise EmbeddingError(f"{path} has a damaged header: make it again")
    return table


def is_table(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is a table."""
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    return f'"{KIND}"'.encode() in head[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _shapes(num_words: int, num_bytes: int, dimension: int, precision: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        "vectors": ((num_words, dimension), precision),
        "word_ends": ((num_words,), "int64"),
        "found": ((num_words,), "uint8"),
        "words": ((num_bytes,), "uint8"),
    }


def _header(shapes: dict[str, tuple[tuple[int, ...], str]]) -> tuple[bytes, int]:
    """Return the header of a safetensors file with these tensors, and the number of bytes after the header."""
    entries: dict[str, Any] = {"__metadata__": {"format": KIND}}
    end = 0
    for name, (shape, kind) in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * np.dtype(kind).itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text = text.ljust(_RESERVED_BYTES - _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, end


def _read_header(mapped: mmap.mmap, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header's entry for each tensor, and the offset at which the tensors begin."""
    begin = _LENGTH_BYTES + int.from_bytes(mapped[:_LENGTH_BYTES], "little")
    try:
        entries = json.loads(mapped[_LENGTH_BYTES:begin])
        kind = entries.pop("__metadata__", {}).get("format")
        end = begin + max(entry["data_offsets"][1] for entry in entries.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise EmbeddingError(f"{path} has no safetensors header: make it again") from None
    if kind != KIND or set(entries) != {*Table._fields} - {"path"}:
        raise EmbeddingError(
            f"{path} holds {', '.join(sorted(entries))} and is not a table of word vectors: give a table that Plimsoll "
            "wrote"
        )
    if end > len(mapped):
        raise EmbeddingError(f"{path} is cut off: it has {len(mapped):,} bytes of {end:,}; make it again")
    return entries, begin


def _view(mapped: mmap.mmap, begin: int, entry: dict[str, Any]) -> NDArray[Any]:
    kind, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if end - start != math.prod(shape) * np.dtype(kind).itemsize:
        raise ValueError(shape)
    return np.frombuffer(mapped, kind, math.prod(shape), begin + start).reshape(shape)
