"""The rows of a table that wait for words of a file, and the words they have got so far.

A row waits for its word as written, in lower case, and capitalised. The first of these forms that the file has is used,
wherever it is in the file. Of equal words, the first in the file is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXACT, LOWER, CAPITALISED, BUILT, MISSING, NO_WORD, PADDING = range(7)
"""The source of a row's vector: a form of its word, parts of the word, or not the file."""
_FORMS = 3  # the number of forms of a word: the first three above


class Pairs(NamedTuple):
    """Rows and the words of a block that they take: ``rows[i]`` takes word ``indexes[i]``.

    ``refused`` are the indexes of words that rows would have taken if they had a usable vector. ``again`` are words
    that occurred before.
    """

    rows: NDArray[np.int64]
    indexes: NDArray[np.int64]
    refused: frozenset[int]
    again: tuple[bytes, ...]


class Wanted:
    """The rows of a table.

    Attributes:
        state: the source of each row's vector, for the part of the file read so far.
    """

    def __init__(self, words: Sequence[str | None], padding: int | None, ignores_case: bool) -> None:
        self._keys: dict[bytes, int | list[int]] = {}  # row * _FORMS + form of each waiting row
        self.state = np.full(len(words), MISSING, np.uint8)
        for row, word in enumerate(words):
            if row == padding:
                self.state[row] = PADDING
            elif word is None:
                self.state[row] = NO_WORD
            else:
                self._add(row, word, ignores_case)
        self._seen: set[bytes] = set()

    def _add(self, row: int, word: str, ignores_case: bool) -> None:
        forms = dict.fromkeys((word, word.lower(), word.capitalize()) if ignores_case else (word,))
        form_of = {word.capitalize(): CAPITALISED, word.lower(): LOWER, word: EXACT}
        for text in forms:
            key, code = text.encode("utf-8", "surrogatepass"), row * _FORMS + form_of[text]
            others = self._keys.setdefault(key, code)
            if others is not code:
                self._keys[key] = [*others, code] if isinstance(others, list) else [others, code]

    @property
    def words(self) -> Collection[bytes]:
        """The words to search for in a file, as bytes."""
        return self._keys.keys()

    def _takers(self, word: bytes) -> list[tuple[int, int]]:
        """Return the rows that would take a word, and its form for each row."""
        codes = self._keys.get(word, [])
        pairs = (divmod(code, _FORMS) for code in (codes if isinstance(codes, list) else [codes]))
        return [(row, form) for row, form in pairs if form < self.state[row] < NO_WORD]

    def open_words(self, words: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the indexes of the words that a row would take. Thread-safe during `give`."""
        return np.array([index for index, word in enumerate(words) if self._takers(word)], np.int64)

    def give(self, words: Sequence[bytes], is_usable: NDArray[np.bool_]) -> Pairs:
        """Assign the words of a block, in file order, to the rows that take them.

        Args:
            words: words of a block.
            is_usable: whether each word has a valid vector. If not, a later occurrence of the word is taken.
        """
        taken: dict[int, int] = {}
        refused, again = set(), []
        for index, word in enumerate(words):
            if word in self._seen:
                again.append(word)
            self._seen.add(word)
            takers = self._takers(word)
            if takers and not is_usable[index]:
                refused.add(index)
                continue
            for row, form in takers:
                self.state[row] = form
                taken[row] = index
        rows, indexes = (np.fromiter(numbers, np.int64, len(taken)) for numbers in (taken, taken.values()))
        return Pairs(rows, indexes, frozenset(refused), tuple(again))
