"""How word vectors lie in files: one module per format, each with the functions of `Format`.

A format is told by the first bytes of a file and never by its name. Every format streams: what is read is a part of the
file at a time, in which the wanted words are found first and only their numbers are parsed.
`plimsoll.embeddings.opening` lists the modules; the contract tests run over every module of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats.helpers.sources import Source

FaultKind = Literal["dimension", "number", "finite", "utf-8", "truncated", "header"]
"""What can be wrong: too few or too many numbers, what is no number, NaN or infinity, a word that is not UTF-8, an
early end, a header that says something else."""


class Fault(NamedTuple):
    """Why a word of a part cannot be used; ``at`` counts the words (lines) of the part from 0, ``what`` shows it."""

    kind: FaultKind
    at: int
    what: str


class Rows(NamedTuple):
    """Vectors, float32, (words, dimension); ``faults`` count from 0 in what was asked for, whose rows are not used."""

    matrix: NDArray[np.float32]
    faults: tuple[Fault, ...] = ()


class Block(NamedTuple):
    """What a part of a file holds.

    Attributes:
        words: the words, in the order of the file, as bytes; where some words are wanted, others may be left out.
        places: the place of each in the part, counted from 0 over all words of the part, ascending.
        num_words: all words of the part, those with faults and those left out included.
        rows: parses the vectors of some of ``words``, given by their indexes.
        faults: of words that are not in ``words``.
    """

    words: list[bytes]
    places: NDArray[np.int64]
    num_words: int
    rows: Callable[[NDArray[np.int64]], Rows]
    faults: tuple[Fault, ...] = ()


class Vectors(Protocol):
    """Word vectors in a file that is open."""

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        ...

    @property
    def num_promised(self) -> int | None:
        """How many words the file says it has, if it says so."""
        ...

    @property
    def num_parts(self) -> int:
        """How many parts there are, where each is work for a processor and can be read by another process; else 0."""
        ...

    @property
    def counted(self) -> str:
        """What a place is called in messages: ``line`` in a file of text, otherwise ``word``."""
        ...

    @property
    def first_number(self) -> int:
        """What the first word is called in messages: its line in a file of text, otherwise 1."""
        ...

    def parts(self, wanted: Collection[bytes] | None) -> Iterator[Callable[[], Block]]:
        """Yield, in the order of the file, what reads one part; it may be called in any thread, once.

        Args:
            wanted: the words that matter; ``None``: all.

        Raises:
            EmbeddingError: if the file cannot be read.
        """
        ...

    def share_read(self) -> float:
        """How much of the file has been handed out as parts, from 0 to 1."""
        ...

    def build(self, words: list[bytes]) -> tuple[NDArray[np.bool_], NDArray[np.float32]] | None:
        """Make vectors of words that are not in the file, as fastText does of their parts; ``None``: not this format.

        Returns:
            which of the words have one, and the rows of all words.
        """
        ...


class Format(Protocol):
    """What a module of this folder offers."""

    TITLE: str
    """How the format is called in tables and messages."""

    def recognises(self, head: bytes, source: Source) -> bool:
        """Whether a file that begins with ``head`` (up to 64 KiB) is of this format."""
        ...

    def open_vectors(self, source: Source) -> Vectors:
        """Open a file of this format.

        Raises:
            EmbeddingError: if it is damaged beyond use, or of a kind that is not covered.
        """
        ...


def rows_of(values: NDArray[Any], faults: tuple[Fault, ...] = ()) -> Rows:
    """Return vectors in single precision, with a fault for each that holds NaN or infinity, behind those given."""
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which is found next
        matrix = values.astype(np.float32, copy=False)
    return Rows(matrix, (*faults, *_not_finite(matrix)))


def in_precision(rows: Rows, precision: Literal["float32", "float16"]) -> Rows:
    """Return rows that are to be kept in half precision with a fault more for each that it has no numbers for."""
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
