"""Vectors in one array, with a separate list of words. Vectors are read from the array when they are needed."""

from __future__ import annotations

import tokenize
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats import Block, Rows, rows_of
from plimsoll.embeddings.formats.helpers.blocks import MAX_DIMENSION, as_set, block_of
from plimsoll.errors import EmbeddingError

_WORDS_AT_ONCE = 1 << 16
_NO_ARRAY = (ValueError, EOFError, SyntaxError, TypeError, OverflowError, tokenize.TokenError)

Build = Callable[[list[bytes]], tuple[NDArray[np.bool_], NDArray[np.float32]]]


class Mapped:
    """Words, and a function that reads the vectors of some rows; see `Vectors`.

    Args:
        words: function that returns an iterator of lists of words, in the order of the rows.
        num_words: the number of words.
        dimension: the number of values per vector.
        vectors: function that returns the vectors of the rows with the given indexes.
        build: function that builds vectors of words that are not in the file, as in `Vectors`; ``None`` if the format
            cannot build them.
    """

    num_parts = 0
    counted = "word"
    first_number = 1

    def __init__(
        self,
        words: Callable[[], Iterator[list[bytes]]],
        num_words: int,
        dimension: int,
        vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]],
        build: Build | None = None,
    ) -> None:
        self._words, self._vectors, self._build, self._share = words, vectors, build, 0.0
        self.num_promised, self.dimension = num_words, dimension

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield one part per list of words; see `Vectors`."""
        wanted, first = as_set(wanted), 0
        for words in self._words():
            self._share = min((first + len(words)) / max(self.num_promised, 1), 1.0)
            yield partial(block_of, words, wanted, partial(self._rows, first))
            first += len(words)
        self._share = 1.0

    def _rows(self, first: int, places: NDArray[np.int64]) -> Rows:
        return rows_of(self._vectors(places + first))

    def share_read(self) -> float:
        """Return the share of the words that the parts yielded so far cover; see `Vectors`."""
        return self._share

    def build(self, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]] | None:
        """Build vectors of words that are not in the file, if the format can; see `Vectors`."""
        return self._build(words) if self._build is not None else None


def in_pieces(words: list[bytes]) -> Iterator[list[bytes]]:
    """Split a list of words into shorter lists."""
    for begin in range(0, len(words), _WORDS_AT_ONCE):
        yield words[begin : begin + _WORDS_AT_ONCE]


def gathered(matrix: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows of a matrix with the indexes ``rows``, in float32; numbers that overflow become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(matrix[rows], np.float32)


def mapped_array(path: Path) -> NDArray[Any]:
    """Map the array in a NumPy file. Pickled objects in it are refused, never loaded.

    Raises:
        EmbeddingError: if the file is truncated, contains objects, or cannot contain word vectors.
    """
    try:
        matrix: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*_NO_ARRAY, OSError, MemoryError) as error:
        raise EmbeddingError(
            f"cannot map {path} as an array ({error}): it may be cut off, or hold objects, which are never unpickled; "
            "save it again with numpy.save(path, array.astype('float32'))"
        ) from None
    require_vectors(str(path), matrix)
    return matrix


def require_vectors(name: str, matrix: NDArray[Any]) -> None:
    """Check that an array can contain word vectors.

    Raises:
        EmbeddingError: if the array does not have two axes, or its data type is not floating-point; it is called
            ``name`` in the message.
    """
    if matrix.ndim != 2 or not 0 < matrix.shape[1] <= MAX_DIMENSION:
        raise EmbeddingError(
            f"{name} has the shape {matrix.shape}, but word vectors need (words, dimension): save it again "
            "with that shape"
        )
    if matrix.dtype.kind != "f" or matrix.dtype.itemsize > 8:
        raise EmbeddingError(
            f"{name} holds {matrix.dtype}, but vectors must be float16, float32 or float64: convert it with "
            "array.astype('float32') and save it again"
        )
