"""File formats of word vectors: one module per format, each with the functions of `Format`.

A format is recognised by the first bytes of a file, never by its name. Every format streams: it reads a part of the
file at a time, finds the wanted words in it, and parses only their numbers. `plimsoll.embeddings.opening` lists the
modules; the contract tests run over every module of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats.helpers.sources import Source

FaultKind = Literal["dimension", "number", "finite", "utf-8", "truncated", "header"]
"""The kinds of faults.

``dimension``: too few or too many numbers. ``number``: a field that is not a number. ``finite``: NaN or infinity.
``utf-8``: a word that is not UTF-8. ``truncated``: an early end. ``header``: a header that contradicts the file.
"""


class Fault(NamedTuple):
    """The reason that a word cannot be used. ``at`` is its position in the part, from 0; ``what`` describes it."""

    kind: FaultKind
    at: int
    what: str


class Rows(NamedTuple):
    """Vectors (words, dimension) in float32.

    ``at`` in ``faults`` is a row of the matrix; such rows must not be used.
    """

    matrix: NDArray[np.float32]
    faults: tuple[Fault, ...] = ()


class Block(NamedTuple):
    """The content of a part of a file.

    Attributes:
        words: the words in file order, as bytes. If only some words are wanted, others may be left out.
        places: the position of each word in the part, counted from 0 over all its words, ascending.
        num_words: the number of all words in the part, including faulty words and those left out.
        rows: function that parses the vectors of some of ``words``, given by their indexes.
        faults: faults of words that are not in ``words``.
    """

    words: list[bytes]
    places: NDArray[np.int64]
    num_words: int
    rows: Callable[[NDArray[np.int64]], Rows]
    faults: tuple[Fault, ...] = ()


class Vectors(Protocol):
    """An open file of word vectors."""

    @property
    def dimension(self) -> int:
        """The number of values per vector."""
        ...

    @property
    def num_promised(self) -> int | None:
        """The number of words according to the file's header; ``None`` without such a header."""
        ...

    @property
    def num_parts(self) -> int:
        """The number of parts if they are worth reading in separate processes; otherwise 0."""
        ...

    @property
    def counted(self) -> str:
        """The name of a position in messages: ``line`` in a text file, otherwise ``word``."""
        ...

    @property
    def first_number(self) -> int:
        """The number of the first word in messages: its line in a text file, otherwise 1."""
        ...

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield, in file order, functions that read one part each. Each can be called once, in any thread.

        Args:
            wanted: the words that matter; ``None``: all words.

        Raises:
            EmbeddingError: if the file cannot be read.
        """
        ...

    def share_read(self) -> float:
        """Return the share of the file (0 to 1) that was handed out as parts."""
        ...

    def build(self, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]] | None:
        """Build vectors of words that are not in the file, as fastText does from n-grams.

        Returns:
            a mask of the words that have a vector, and a row for every word; ``None`` if the format cannot build
            vectors.
        """
        ...


class Format(Protocol):
    """The functions of a module of this folder."""

    TITLE: str
    """The name of the format in tables and messages."""

    def recognises(self, head: bytes, source: Source) -> bool:
        """Return whether a file that begins with ``head`` (up to 64 KiB) has this format."""
        ...

    def open_vectors(self, source: Source) -> Vectors:
        """Open a file of this format.

        Raises:
            EmbeddingError: if it is too damaged to be used, or of an unsupported kind.
        """
        ...


def rows_of(values: NDArray[Any], faults: tuple[Fault, ...] = ()) -> Rows:
    """Return vectors in single precision, adding a fault for each that contains NaN or infinity."""
    with np.errstate(over="ignore"):  # too large values become infinite, which is checked next
        matrix = values.astype(np.float32, copy=False)
    return Rows(matrix, (*faults, *_not_finite(matrix)))


def in_precision(rows: Rows, precision: Literal["float32", "float16"]) -> Rows:
    """Return the rows, adding a fault for each row that overflows in the precision."""
    if precision == "float32":
        return rows
    with np.errstate(over="ignore"):
        half = rows.matrix.astype(np.float16)
    known = {fault.at for fault in rows.faults}
    too_large = (fault for fault in _not_finite(half, " in float16") if fault.at not in known)
    return Rows(rows.matrix, (*rows.faults, *too_large))


def _not_finite(matrix: NDArray[Any], where: str = "") -> Iterator[Fault]:
    is_finite = np.isfinite(matrix)
    for row in np.flatnonzero(~is_finite.all(axis=1)).tolist():
        column = int(is_finite[row].argmin())
        yield Fault("finite", row, f"number {column + 1} of {matrix.shape[1]} is {matrix[row, column]}{where}")
