"""Augmentation of text before it is tokenized: words are deleted, swapped and replaced by synonyms.

Changes differ in each epoch. Each draw is a function of the seed, the epoch and the index of the sample
(`plimsoll.data.batches.order`). Words are separated by white space, which is kept. A synonym replaces a word without
its punctuation and takes its case.

A table of synonyms is a user's file: a ``.json`` object from words to lists of words, or lines of tab-separated words.
One of the other words of a line replaces the first word. Not handled: inflection, multi-word expressions, languages
written without spaces, in which a text is one word.

Shapes: B texts; flat arrays have one element for each word of all texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batches.augment import UserFunction, spared, swap_places
from plimsoll.data.batches.order import sample_keys, uniform
from plimsoll.errors import DataError
from plimsoll.records.augmentation import Augmentation

_DELETE, _REPLACE, _CHOOSE = range(8, 11)  # purposes of draws, different from the purposes for tokens
_PARTS = re.compile(r"(\S+)")
_CORE = re.compile(r"\w(?:.*\w)?")  # a word without the punctuation around it

Synonyms = dict[str, tuple[str, ...]]


class TextAugmentation:
    """The part of an `Augmentation` that changes text; picklable.

    Raises:
        DataError: if the table of synonyms cannot be read, or the user's function cannot be imported.
    """

    def __init__(self, config: Augmentation, seed: int) -> None:
        self.config, self._seed = config, seed
        self._synonyms = read_synonyms(Path(config.synonyms)) if config.synonyms else {}
        self._function = UserFunction(config.function, "function") if config.function else None

    def apply(self, text: str, sample_id: int, epoch: int) -> str:
        """Return one changed text. For many texts, `apply_all` takes much less time per text."""
        return self.apply_all([text], np.array([sample_id]), epoch)[0]

    def apply_all(self, texts: Sequence[str], ids: NDArray[np.int64], epoch: int) -> list[str]:
        """Return the texts, each changed independently of the others. A text with words keeps at least one.

        Raises:
            DataError: if the user's function does not return a string, or returns no word for a text with words.
        """
        keys_B = sample_keys(self._seed, epoch, ids)
        changed = list(texts)
        if self.config.synonym_share or self.config.delete_word or self.config.swap_word:
            with_words = [number for number, text in enumerate(texts) if not text.isspace() and text]
            if with_words:
                results = self._changed([texts[number] for number in with_words], keys_B[with_words])
                for number, result in zip(with_words, results, strict=True):
                    changed[number] = result
        if self._function:
            named = zip(changed, ids.tolist(), keys_B.tolist(), strict=True)
            changed = [self._called(self._function, text, number, key) for text, number, key in named]
        return changed

    def _called(self, function: UserFunction, text: str, number: int, key: int) -> str:
        result = function(text, key)
        if not isinstance(result, str) or (text.strip() and not result.strip()):
            raise DataError(
                f"function {self.config.function} returned {result!r} for text {number}: return a text that is not "
                f"empty, such as the one it was given"
            )
        return result

    def _changed(self, texts: Sequence[str], keys_B: NDArray[np.uint64]) -> list[str]:
        parts = [_PARTS.split(text) for text in texts]  # white space, word, white space, word, ..., white space
        lengths_B = np.array([len(row) // 2 for row in parts])
        are_free = np.ones(lengths_B.sum(), np.bool_)
        words = [word for row in parts for word in row[1::2]]
        gaps = [gap for row in parts for gap in row[2::2]]
        if self.config.synonym_share:
            self._replace(words, keys_B, lengths_B)
        if self.config.swap_word:
            places = swap_places(keys_B, are_free, lengths_B, self.config.swap_word, self.config.swap_distance)
            words = [words[place] for place in places.tolist()]
        if self.config.delete_word:
            kept = spared(uniform(keys_B, _DELETE, lengths_B), self.config.delete_word, are_free, lengths_B)
            for place in np.flatnonzero(~kept).tolist():
                words[place] = gaps[place] = ""
        stops = np.cumsum(lengths_B).tolist()
        whole = [word + gap for word, gap in zip(words, gaps, strict=True)]
        return [
            row[0] + "".join(whole[begin:stop]) for row, begin, stop in zip(parts, [0, *stops], stops, strict=False)
        ]

    def _replace(self, words: list[str], keys_B: NDArray[np.uint64], lengths_B: NDArray[np.int64]) -> None:
        choices = uniform(keys_B, _CHOOSE, lengths_B)
        for place in np.flatnonzero(uniform(keys_B, _REPLACE, lengths_B) < self.config.synonym_share).tolist():
            core = _CORE.search(words[place])
            others = self._synonyms.get(core[0].lower(), ()) if core else ()
            if core and others:
                other = _cased(others[int(choices[place] * len(others))], core[0])
                words[place] = words[place][: core.start()] + other + words[place][core.end() :]


def read_synonyms(path: Path) -> Synonyms:
    """Read a table of synonyms. A word on several lines has the synonyms of all these lines.

    Raises:
        DataError: if the file is missing, is not UTF-8, has no words, or has an invalid line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the synonyms {path} ({error}): give a file of tab-separated words") from None
    rows = _rows_of_json(path, text) if path.suffix == ".json" else _rows_of_lines(path, text)
    table: Synonyms = {}
    for word, *others in rows:
        table[word.lower()] = (*table.get(word.lower(), ()), *others)
    if not table:
        raise DataError(f"the synonyms {path} hold no word: write lines such as `quick<TAB>fast<TAB>swift`")
    return table


def _rows_of_lines(path: Path, text: str) -> list[list[str]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        words = [word.strip() for word in line.split("\t")]
        if len(words) < 2 or not all(words):
            raise DataError(
                f"line {number} of the synonyms {path} is {line!r}: write a word and its synonyms, separated by "
                f"tabs, as in `quick<TAB>fast<TAB>swift`"
            )
        rows.append(words)
    return rows


def _rows_of_json(path: Path, text: str) -> list[list[str]]:
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"line {error.lineno} of the synonyms {path} is not JSON ({error.msg}): correct it") from None
    faults = [word for word, others in table.items() if not _are_words(others)] if isinstance(table, dict) else [table]
    if faults:
        raise DataError(
            f"in the synonyms {path}, the entry {faults[0]!r} is not a list of words: write an object such as "
            f'{{"quick": ["fast", "swift"]}}'
        )
    return [[word, *others] for word, others in table.items()]


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and word for word in value)


def _cased(word: str, model: str) -> str:
    if len(model) > 1 and model.isupper():
        return word.upper()
    return word[:1].upper() + word[1:] if model[:1].isupper() else word
