"""Faults in a file of word vectors: counted with the first examples of each kind, or raised as an error."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from plimsoll.embeddings.formats import Block, Fault, FaultKind, Rows
from plimsoll.embeddings.opening import Opened
from plimsoll.errors import EmbeddingError
from plimsoll.records.embeddings import FaultCount

_MOST_EXAMPLES = 5
_NAMES: dict[FaultKind, str] = {
    "dimension": "wrong dimension",
    "number": "not a number",
    "finite": "NaN or infinite",
    "utf-8": "a word that is not UTF-8",
    "truncated": "cut off",
    "header": "wrong header",
}


class FaultList:
    """The faults of a file of word vectors, which is read in parts. In strict mode, the first fault raises an error.

    Attributes:
        num_entries: number of words in the parts read so far, including faulty and repeated ones.
        num_duplicates: number of words that had already occurred in the file.
    """

    def __init__(self, opened: Opened, strict: bool) -> None:
        self._opened, self._strict = opened, strict
        self._counts: dict[FaultKind, int] = {}
        self._examples: dict[FaultKind, list[str]] = {}
        self.num_entries = self.num_duplicates = 0

    def add(self, block: Block, indexes: NDArray[np.int64], rows: Rows) -> None:
        """Add the faults of a part of the file, and the faults of the vectors parsed from it.

        Args:
            block: the content of the part.
            indexes: the indexes in ``block.words`` of the parsed vectors.
            rows: the parsed vectors, with their faults.

        Raises:
            EmbeddingError: for the first fault, in strict mode.
        """
        of_rows = [_in_part(fault, block, int(indexes[fault.at])) for fault in rows.faults]
        for fault in sorted([*block.faults, *of_rows], key=lambda fault: fault.at):
            self._add(fault.kind, f"{self._place(fault.at)}: {fault.what}")
        self.num_entries += block.num_words

    def end(self) -> None:
        """Add a fault if the file has fewer or more words than its header states.

        Raises:
            EmbeddingError: for this fault, in strict mode.
        """
        promised = self._opened.vectors.num_promised
        if promised is not None and self.num_entries < promised and "truncated" not in self._counts:
            self._add("truncated", f"{self.num_entries:,} of the {promised:,} words that the header states")
        elif promised is not None and self.num_entries > promised:
            self._add("header", f"it states {promised:,} words, but the file has {self.num_entries:,}")

    def add_again(self, words: Iterable[bytes]) -> None:
        """Count words that had already occurred in the file.

        Raises:
            EmbeddingError: for the first of these words, in strict mode.
        """
        for word in words:
            if self._strict:
                raise EmbeddingError(
                    f"{self._opened.source.name}: {word.decode('utf-8', 'replace')!r} occurs more than once: remove "
                    "all but one, or leave out --strict to take the first"
                )
            self.num_duplicates += 1

    def counts(self) -> tuple[FaultCount, ...]:
        """Return the number of faults of each kind, with up to five examples."""
        return tuple(
            FaultCount(kind=_NAMES[kind], count=count, examples=tuple(self._examples[kind]))
            for kind, count in self._counts.items()
        )

    def _add(self, kind: FaultKind, example: str) -> None:
        if self._strict:
            raise EmbeddingError(
                f"{self._opened.source.name}: {example} ({_NAMES[kind]}): correct the file, or leave out --strict to "
                "skip such entries"
            )
        self._counts[kind] = self._counts.get(kind, 0) + 1
        examples = self._examples.setdefault(kind, [])
        if len(examples) < _MOST_EXAMPLES:
            examples.append(example)

    def _place(self, at: int) -> str:
        number = self._opened.vectors.first_number + self.num_entries + at
        return f"{self._opened.vectors.counted} {number:,}"


def _in_part(fault: Fault, block: Block, index: int) -> Fault:
    """Return the fault of the vector of a word, given by its index in ``block.words``.

    The position of the fault becomes the word's position in the part, and the description names the word.
    """
    word = block.words[index].decode("utf-8", "replace")
    return fault._replace(at=int(block.places[index]), what=f"{word!r}: {fault.what}")
