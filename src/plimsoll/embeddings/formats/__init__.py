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
"""The kinds of faults in a file of word vectors.

``dimension``: too few or too many numbers. ``number``: a field that is not a number. ``finite``: NaN or infinity.
``utf-8``: a word that is not UTF-8. ``truncated``: an early end. ``header``: a header that contradicts the file.
"""


class Fault(NamedTuple):
    """A fault of a word, which therefore cannot be used.

    ``kind`` is the kind of the fault, and ``what`` describes it. ``at`` is the position of the word among all words of
    the part of the file that was read, from 0.
    """

    kind: FaultKind
    at: int
    what: str


class Rows(NamedTuple):
    """Vectors (words, dimension) in float32.

    For each fault in ``faults``, ``at`` is the index of a row that must not be used.
    """

    matrix: NDArray[np.float32]
    faults: tuple[Fault, ...] = ()


class Block(NamedTuple):
    """The content of a part of a file.

    Attributes:
        words: the words in file order, as bytes. If only some words are wanted, other words may be left out.
        places: for each of ``words``, its position among all words of the part, from 0.
        num_words: the number of all words in the part, including faulty words and words left out.
        rows: function that parses the vectors of the words at some indexes of ``words``.
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
        """The number of parts that `parts` yields, if it is fast to read them in separate processes; otherwise 0."""
        ...

    @property
    def counted(self) -> str:
        """The unit of positions in messages: ``line`` in a text file, otherwise ``word``."""
        ...

    @property
    def first_number(self) -> int:
        """The number by which messages name the first word: its line in a text file, otherwise 1."""
        ...

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield, in file order, functions that read one part of the file each. Call each once, in any thread.

        Args:
            wanted: the words whose vectors are needed; ``None``: all words.

        Raises:
            EmbeddingError: if the file cannot be read.
        """
        ...

    def share_read(self) -> float:
        """Return the share of the file (0 to 1) that the parts yielded so far cover."""
        ...

    def build(self, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]] | None:
        """Build vectors of words that are not in the file, as fastText does from n-grams.

        Returns:
            a mask of the words that got a vector (words,), and the vectors (words, dimension); ``None`` if the format
            cannot build vectors. Vectors outside the mask must not be used.
        """
        ...


class Format(Protocol):
    """The functions that each module of this folder defines."""

    TITLE: str
    """The name of the format, as shown to users."""

    def recognises(self, head: bytes, source: Source) -> bool:
        """Return whether a file that begins with ``head`` (up to 64 KiB) has this format."""
        ...

    def open_vectors(self, source: Source) -> Vectors:
        """Open a file of this format.

        Raises:
            EmbeddingError: if the file is too damaged to be used, or is an unsupported variant of the format.
        """
        ...


def rows_of(values: NDArray[Any], faults: tuple[Fault, ...] = ()) -> Rows:
    """Return vectors in float32 with ``faults``, and a further fault for each vector with NaN or infinity."""
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, which is checked next
        matrix = values.astype(np.float32, copy=False)
    return Rows(matrix, (*faults, *_not_finite(matrix)))


def in_precision(rows: Rows, precision: Literal["float32", "float16"]) -> Rows:
    """Return the rows, still in float32, with a further fault for each row that would overflow in ``precision``."""
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
