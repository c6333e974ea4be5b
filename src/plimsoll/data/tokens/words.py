"""Splitting of texts into words, and word counts for texts that are larger than memory.

Words roughly follow the Penn Treebank style of the texts of GloVe's vectors. One regular expression defines them, and
Python's ``re`` and the ``Split`` of Hugging Face ``tokenizers`` give the same matches. Words joined with spaces are
split into the same words again.

Not handled: scripts without spaces (a run of Chinese is one word). Abbreviations such as ``Mr.`` are two words,
``cannot`` is one, and ``O'Neill`` is three. Curly quotes are not straightened. Letters newer than Python's Unicode
tables are not lowercased, and signs newer than the tables count as letters.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, islice

import numpy as np

from plimsoll.data.text.corpus import Corpus
from plimsoll.files.store import Progress, silent

_MOST_WORDS = 4 << 20
_MOST_CHUNKS, _MOST_CHUNK_CHARS, _CHARS_PER_CHUNK = 1 << 20, 256 << 20, 256
_TEXTS_AT_ONCE = 256
_REPORT_BYTES = 1 << 20
_MOST_PARTS = 999  # of a word after its first letter: the regex engine of `tokenizers` fails on words with millions
_SELECTORS = {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}


@dataclass(frozen=True)
class WordCounts:
    """The number of occurrences of each word.

    Each count may be too small by up to ``most_missed``, and a missing word may have occurred up to that often.
    ``most_missed`` is 0, and all counts are exact, unless words were dropped to limit memory. ``num_left_out`` counts
    dropped words; a word that reappears and is dropped again counts twice.
    """

    counts: Counter[str]
    most_missed: int = 0
    num_left_out: int = 0

    def ranked(self, min_count: int = 1) -> list[str]:
        """Return the words with at least ``min_count`` occurrences, by falling count, then alphabetically."""
        kept = [(-count, word) for word, count in self.counts.items() if count >= min_count]
        return [word for _, word in sorted(kept)]


def count_words(
    corpus: Corpus, lowercase: bool = False, progress: Progress = silent, most_words: int = _MOST_WORDS
) -> WordCounts:
    """Count the words of all texts of a corpus.

    Args:
        corpus: the texts; about 16 MiB of them are in memory at a time.
        lowercase: whether to lowercase all words.
        progress: called with the stage ``"words"``.
        most_words: the maximum number of distinct words; beyond it, the rarest are dropped. 4 million words of usual
            length take about 600 MiB.

    Raises:
        DataError: if a file of the corpus has changed since it was indexed.
    """
    return count_texts(_pieces(corpus, progress), lowercase, most_words)


def count_texts(
    texts: Iterable[str], lowercase: bool = False, most_words: int = _MOST_WORDS, most_chunks: int | None = None
) -> WordCounts:
    """Count the words of texts.

    Chunks between white space are counted first, and each distinct chunk is split into words once: 3 to 5 times as fast
    as splitting the whole text. (Two worker processes were not even a fifth faster.)
    """
    words: Counter[str] = Counter()
    most_missed = num_left_out = 0
    for chunks in _counted_chunks(iter(texts), _MOST_CHUNKS if most_chunks is None else most_chunks):
        for chunk, count in chunks.items():
            for word in words_of(chunk, lowercase):
                words[word] += count
        if len(words) > most_words:
            dropped_count = _nth_count(words, most_words // 2)
            kept = Counter({word: count for word, count in words.items() if count > dropped_count})
            num_left_out += len(words) - len(kept)
            words = kept
            most_missed += dropped_count
    return WordCounts(words, most_missed, num_left_out)


def words_of(text: str, lowercase: bool = False) -> list[str]:
    """Split a text into its words."""
    return _compiled().findall(lowered(text) if lowercase else text)


def lowered(text: str) -> str:
    """Return a text in lowercase, letter by letter: without the special sigma at the end of Greek words."""
    return text.replace("\u03a3", "\u03c3").lower()


@cache
def word_pattern() -> str:
    """Return the regular expression whose successive matches are the words of a text."""
    signs, others = _classes()  # explicit ranges, because the character classes of the two engines differ
    end = rf"(?![^{others}{signs}])"
    letter = rf"(?:[a-mo-zA-MO-Z0-9]|[^nN{others}{signs}]|[nN](?!['\u2019][tT]{end}))"  # first part: speed
    alternatives = (
        rf"[A-Za-z]\.(?:[A-Za-z]\.){{1,{_MOST_PARTS}}}",  # U.S.
        rf"[nN]['\u2019][tT]{end}",  # do n't
        rf"['\u2019](?:[sSdDmM]|re|RE|ve|VE|ll|LL){end}",  # it 's
        rf"{letter}(?:[-\u200c\u200d]?{letter}|(?<=[0-9])[.,][0-9]){{0,{_MOST_PARTS}}}",  # state-of-the-art, 1,000.5
        rf"\.\.\.|--|``|''|[{signs}]",
    )
    return "|".join(alternatives)


@cache
def _compiled() -> re.Pattern[str]:
    return re.compile(word_pattern())


def _classes() -> tuple[str, str]:
    """Return the characters that are signs, and the characters outside words, as ranges for a regular expression."""
    ranges = {"sign": "", "other": "", "letter": ""}
    for kind, run in groupby(range(sys.maxunicode + 1), _kind):
        first, *rest = run
        ranges[kind] += "-".join(re.escape(chr(code)) for code in (first, *rest[-1:]))
    return ranges["sign"], ranges["other"]


def _kind(code: int) -> str:
    category = unicodedata.category(chr(code))
    if category[0] in "PS":
        return "sign"
    # Format characters and variation selectors separate words, except for joiners inside a word (`word_pattern`).
    is_other = category[0] == "Z" or category in {"Cc", "Cf"} or code in _SELECTORS
    return "other" if is_other else "letter"


def _counted_chunks(texts: Iterator[str], most_chunks: int) -> Iterator[Counter[str]]:
    """Count chunks between white space. Yield a counter whenever it has about ``most_chunks`` distinct chunks."""
    chunks: Counter[str] = Counter()
    num_chars = 0
    while some := list(islice(texts, _TEXTS_AT_ONCE)):
        chunks.update(chain.from_iterable(map(str.split, some)))
        num_chars += sum(map(len, some))
        if len(chunks) > most_chunks or num_chars > min(_MOST_CHUNK_CHARS, _CHARS_PER_CHUNK * most_chunks):
            yield chunks
            chunks, num_chars = Counter(), 0
    yield chunks


def _nth_count(words: Counter[str], rank: int) -> int:
    """Return the count of the word at index ``rank`` (from 0) if words are sorted by falling count."""
    counts = np.fromiter(words.values(), np.int64, len(words))
    place = len(counts) - 1 - rank
    return int(np.partition(counts, place)[place])


def _pieces(corpus: Corpus, progress: Progress) -> Iterator[str]:
    num_texts = num_bytes = reported_bytes = 0
    for piece, is_last in corpus.pieces():
        yield piece
        num_texts += is_last
        num_bytes += len(piece) if piece.isascii() else len(piece.encode())
        if num_bytes - reported_bytes >= _REPORT_BYTES:
            reported_bytes = num_bytes
            share = max(num_bytes / corpus.num_bytes, num_texts / len(corpus))
            progress("words", round(min(share, 1) * corpus.num_bytes), corpus.num_bytes)
    progress("words", corpus.num_bytes, corpus.num_bytes)
