"""A table of vectors with its words in one safetensors file, opened by memory map.

Tensors: ``vectors`` (words, dimension) in float32 or float16; ``words``, the UTF-8 bytes of all words one after the
other; ``word_ends``, where each ends; ``found``, how each row came to its vector (`plimsoll.embeddings.wanted`). Any
program that reads safetensors reads it. The place of every byte is known before the first vector is, so a table is
filled in place, in a file that is mapped, and takes no memory of the process that the kernel cannot have back.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import EmbeddingError

KIND = "plimsoll-embeddings"
Precision = Literal["float32", "float16"]
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 64
_NO_WORD = b"\xff"  # a byte that UTF-8 does not have: the row stands for no word
_TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I64": np.int64}
_NAMES = {np.dtype(kind).name: name for name, kind in _TYPES.items()}


class Table(NamedTuple):
    """Vectors in a file that is mapped."""

    path: Path
    vectors: NDArray[Any]
    found: NDArray[np.uint8]
    words: NDArray[np.uint8]
    word_ends: NDArray[np.int64]

    def texts(self) -> list[str | None]:
        """Return the word of each row; it takes a Python object per word."""
        return [None if raw == _NO_WORD else raw.decode("utf-8", "surrogatepass") for raw in self.raw_words()]

    def raw_words(self) -> list[bytes]:
        """Return the words as bytes."""
        raw, ends = self.words.tobytes(), self.word_ends.tolist()
        return [raw[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=bool(ends))]


def create_table(path: Path, words: Sequence[str | None], dimension: int, precision: Precision) -> Table:
    """Make the file of a table whose vectors are zero and still to be filled.

    Raises:
        OSError: if the disk is full: its blocks are taken at once.
    """
    raw = [_NO_WORD if word is None else word.encode("utf-8", "surrogatepass") for word in words]
    ends = np.cumsum([0, *map(len, raw)], dtype=np.int64)[1:]
    shapes = {
        "vectors": ((len(raw), dimension), precision),
        "word_ends": ((len(raw),), "int64"),
        "found": ((len(raw),), "uint8"),
        "words": ((sum(map(len, raw)),), "uint8"),
    }
    head, num_bytes = _header(shapes)
    with path.open("wb+") as file:
        file.write(head)
        os.posix_fallocate(file.fileno(), 0, len(head) + num_bytes)
    table = open_table(path, is_writable=True)
    table.word_ends[:] = ends
    table.words[:] = np.frombuffer(b"".join(raw), np.uint8)
    return table


def open_table(path: Path, is_writable: bool = False) -> Table:
    """Map a table.

    Raises:
        EmbeddingError: if it is cut off, or none of ours.
    """
    with path.open("rb+" if is_writable else "rb") as file:
        access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=access)
        except ValueError:
            raise EmbeddingError(f"{path} has 0 bytes: make it again") from None
    entries, begin = _read_header(mapped, path)
    return Table(path, **{name: _view(mapped, begin, entry) for name, entry in entries.items()})


def is_table(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a table."""
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    return f'"{KIND}"'.encode() in head[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _header(shapes: dict[str, tuple[tuple[int, ...], str]]) -> tuple[bytes, int]:
    """Return the head of a safetensors file, and how many bytes follow it."""
    entries: dict[str, Any] = {"__metadata__": {"format": KIND}}
    end = 0
    for name, (shape, kind) in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * np.dtype(kind).itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, end


def _read_header(mapped: mmap.mmap, path: Path) -> tuple[dict[str, Any], int]:
    """Return what the file says of its tensors, and where their bytes begin."""
    begin = _LENGTH_BYTES + int.from_bytes(mapped[:_LENGTH_BYTES], "little")
    try:
        entries = json.loads(mapped[_LENGTH_BYTES:begin])
        kind = entries.pop("__metadata__", {}).get("format")
        end = begin + max(entry["data_offsets"][1] for entry in entries.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise EmbeddingError(f"{path} has no header of a safetensors file: make it again") from None
    if kind != KIND or set(entries) != {*Table._fields} - {"path"}:
        raise EmbeddingError(f"{path} holds {', '.join(sorted(entries))} and is no table of word vectors: give one")
    if end > len(mapped):
        raise EmbeddingError(f"{path} is cut off: it has {len(mapped):,} bytes of {end:,}; make it again")
    return entries, begin


def _view(mapped: mmap.mmap, begin: int, entry: dict[str, Any]) -> NDArray[Any]:
    kind, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    return np.frombuffer(mapped, kind, int(np.prod(shape)), begin + entry["data_offsets"][0]).reshape(shape)
