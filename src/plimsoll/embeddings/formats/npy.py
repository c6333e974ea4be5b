"""A NumPy array (``.npy``), and a file of its words in the same folder.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html: a floating-point array (words, dimension), in
either byte order and in C or Fortran order. It is memory-mapped, and rows are converted to float32 when they are read.
The words of ``x.npy`` are in the first of these files that exists and does not hold vectors: ``x.txt``, ``x.words``,
``x.vocab``, ``x.json``, ``words.txt``, ``vocab.txt``, ``vocabulary.txt``, ``vocab.json``. This file has a word per
line, a JSON list of words, or a JSON object with the row of each word. A carriage return before a newline is ignored.
Pickled objects are never loaded.

Does NOT support .npz archives, words with newlines in .txt, and compressed .npy files, which cannot be mapped and have
no words next to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from plimsoll.embeddings.formats.helpers.blocks import MAX_WORD_BYTES
from plimsoll.embeddings.formats.helpers.lines import dimension_of
from plimsoll.embeddings.formats.helpers.mapped import Mapped, gathered, in_pieces, mapped_array
from plimsoll.embeddings.formats.helpers.sources import HEAD_BYTES, Source, words_files
from plimsoll.errors import EmbeddingError

TITLE = "numpy array with words"

_MAGIC = b"\x93NUMPY"
_CHUNK_BYTES = 1 << 20


def recognises(head: bytes, source: Source) -> bool:
    """Return whether a file begins like a NumPy array; see `Format`."""
    return head.startswith(_MAGIC)


def open_vectors(source: Source) -> Mapped:
    """Map the array and find its words; see `Format`."""
    if source.packing:
        raise EmbeddingError(
            f"{source.name} is a .npy file in a {source.packing} file, which cannot be mapped or have words "
            "next to it: move it, unpacked, into a folder with the file of its words"
        )
    matrix = mapped_array(source.path)
    vectors, dimension = partial(gathered, matrix), matrix.shape[1]
    path = _words_file(source.path, dimension)
    if path.suffix == ".json":
        words = _from_json(path, len(matrix))
        _require_as_many(path, len(words), source, len(matrix))
        return Mapped(lambda: in_pieces(words), len(words), dimension, vectors)
    _require_as_many(path, sum(map(len, _lines(path))), source, len(matrix))
    return Mapped(lambda: _lines(path), len(matrix), dimension, vectors)


def _words_file(path: Path, dimension: int) -> Path:
    candidates = words_files(path)
    for candidate in candidates:
        if candidate.is_file() and candidate != path and not _holds_vectors(candidate, dimension):
            return candidate
    raise EmbeddingError(
        f"{path} has no words: write them, one per line in the order of the rows, into {candidates[0].name} next to it "
        f"(tried: {', '.join(candidate.name for candidate in candidates)})"
    )


def _holds_vectors(path: Path, dimension: int) -> bool:
    """Return whether a file is the array in a text format: each word is followed by ``dimension`` numbers."""
    with _opened(path) as file:
        return dimension_of(file.read(HEAD_BYTES)) == dimension


def _require_as_many(path: Path, num_words: int, source: Source, num_rows: int) -> None:
    if num_words != num_rows:
        raise EmbeddingError(
            f"{path} has {num_words} words, but {source.name} has {num_rows} rows: give the words that the array was "
            "saved with, one for each row"
        )


def _lines(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines of a file in lists. The empty string after the last newline is not a line."""
    rest = b""
    with _opened(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
            if len(rest) > MAX_WORD_BYTES:
                raise EmbeddingError(
                    f"{path} has a line longer than {MAX_WORD_BYTES} bytes, which is too long for a word: "
                    "write one word per line"
                )
    if rest:
        yield [rest.removesuffix(b"\r")]


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise EmbeddingError(f"cannot read {path} ({error.strerror or error}): change its permissions") from None


def _from_json(path: Path, num_rows: int) -> list[bytes]:
    try:
        with _opened(path) as file:
            words = json.load(file)
    except (ValueError, RecursionError) as error:
        raise EmbeddingError(f"{path} is not JSON ({error}): write a list of words, in the order of the rows") from None
    if isinstance(words, dict):
        words = _by_row(path, words, num_rows)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise EmbeddingError(
            f"{path} holds neither a list of words nor an object with the row of each word, but a "
            f"{type(words).__name__}: write one of these"
        )
    return [word.encode("utf-8", "surrogatepass") for word in words]


def _by_row(path: Path, row_of: dict[str, Any], num_rows: int) -> list[str]:
    words: dict[int, str] = {}
    for word, row in row_of.items():
        if type(row) is not int or not 0 <= row < num_rows or row in words:
            raise EmbeddingError(
                f"{path} has row {row!r} for {word!r}, but rows must be 0 to {num_rows - 1}, each once: correct it"
            )
        words[row] = word
    return [words[row] for row in sorted(words)]
