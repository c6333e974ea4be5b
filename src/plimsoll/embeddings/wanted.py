"""Assignment of the words of a file to the rows of a table.

A row accepts its word as written and, if case is ignored, in lower case and capitalised. It takes the first of these
forms that occurs anywhere in the file. If a form occurs several times, its first valid vector is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXACT, LOWER, CAPITALISED, BUILT, MISSING, NO_WORD, PADDING = range(7)
"""The source of a row's vector.

`EXACT`, `LOWER` and `CAPITALISED`: the file's vector of the word as written, in lower case, or capitalised. `BUILT`: a
vector made from the n-grams of the word. The vectors of other rows are not from the file. `MISSING`: the file has no
form of the word. `NO_WORD`: the row has no word. `PADDING`: the row stays zero.
"""
_FORMS = 3  # the number of forms of a word: EXACT, LOWER and CAPITALISED


class Pairs(NamedTuple):
    """Rows, and the words that they take from a part of the file: ``rows[i]`` takes the word ``indexes[i]``.

    ``refused`` are the indexes of words that a row would have taken if their vector were valid. ``again`` are words
    that had already occurred in the file.
    """

    rows: NDArray[np.int64]
    indexes: NDArray[np.int64]
    refused: frozenset[int]
    again: tuple[bytes, ...]


class Wanted:
    """The rows of a table, and the forms of words that they still accept.

    Attributes:
        state: the source of each row's vector so far, such as `EXACT` or `MISSING`, (rows,).
    """

    def __init__(self, words: Sequence[str | None], padding: int | None, ignores_case: bool) -> None:
        # For each form of a word: row * _FORMS + form, or a list of these if several rows accept it.
        self._keys: dict[bytes, int | list[int]] = {}
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
        """The words to search for in a file, in all forms, as UTF-8 bytes."""
        return self._keys.keys()

    def _takers(self, word: bytes) -> list[tuple[int, int]]:
        """Return the rows that would take a word now, each with the form (such as `LOWER`) that the word is for it."""
        codes = self._keys.get(word, [])
        pairs = (divmod(code, _FORMS) for code in (codes if isinstance(codes, list) else [codes]))
        return [(row, form) for row, form in pairs if form < self.state[row] < NO_WORD]

    def open_words(self, words: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the indexes of those words that some row would take now. Other threads may run `give` meanwhile."""
        return np.array([index for index, word in enumerate(words) if self._takers(word)], np.int64)

    def give(self, words: Sequence[bytes], is_usable: NDArray[np.bool_]) -> Pairs:
        """Assign the words of a part of the file, in file order, to the rows that take them.

        Args:
            words: the words of the part.
            is_usable: whether each word has a valid vector, (words,). A word without one is not assigned, so that a
                later occurrence can be.
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
