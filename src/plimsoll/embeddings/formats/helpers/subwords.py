"""Character n-grams of words with fastText's hashes, and the sums of their vectors in fastText's order.

https://github.com/facebookresearch/fastText/blob/main/src/dictionary.cc (``computeSubwords``, ``hash``). The word is
put between ``<`` and ``>``. Its n-grams are all substrings of ``minn`` to ``maxn`` letters, except a lone ``<`` or
``>``. The bucket of an n-gram is the 32-bit FNV-1a hash over its sign-extended bytes, modulo the number of buckets. In
fastText, the word ``</s>`` has no n-grams; in gensim it has. A letter is a byte that is not a UTF-8 continuation byte,
with the continuation bytes after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_NGRAM_LETTERS = 100
"""More letters than any model's n-grams have: a header with more is damaged."""

_FNV_BASIS, _FNV_PRIME = np.uint32(2166136261), np.uint32(16777619)
_SIGN_EXTENDED = np.arange(256, dtype=np.uint8).astype(np.int8).astype(np.int32).view(np.uint32)
_ROWS_AT_ONCE_BYTES = 16 << 20
_WORDS_AT_ONCE = 1024


class Ngrams(NamedTuple):
    """The n-grams of a model: their lengths in letters, and the number of buckets.

    The attribute ``without`` is a word that gets no n-grams; ``None`` if the model has no such word.
    """

    min_letters: int
    max_letters: int
    num_buckets: int
    without: bytes | None = None

    @property
    def are_none(self) -> bool:
        """True if no word has an n-gram."""
        return self.num_buckets < 1 or self.max_letters < max(self.min_letters, 1)


def buckets_of(words: list[bytes], ngrams: Ngrams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the buckets of the words' n-grams, word after word, and the number of n-grams of each word, (words,)."""
    if ngrams.are_none or not words:
        return np.empty(0, np.int64), np.zeros(len(words), np.int64)
    raw = np.frombuffer(b"".join([b"<%b>" % word for word in words]), np.uint8)
    first = max(ngrams.min_letters, 1)
    letters = ((raw & 0xC0) != 0x80).nonzero()[0]
    letter_bytes = np.diff(letters, append=len(raw))
    word_ends = np.cumsum([len(word) + 2 for word in words])
    word_of = np.searchsorted(word_ends, letters, side="right")
    num_letters = np.bincount(word_of, minlength=len(words))
    ends = np.cumsum(num_letters)  # the end of each word, as an index of letters
    num_behind = ends[word_of] - np.arange(len(letters))
    is_edge = (num_behind == 1) | (np.arange(len(letters)) == (ends - num_letters)[word_of])
    last = min(ngrams.max_letters, int(num_letters.max()))
    buckets = np.full((len(letters), max(last - first + 1, 0)), -1, np.int64)
    hashes = np.full(len(letters), _FNV_BASIS)
    for length in range(1, last + 1):
        begins = (num_behind >= length).nonzero()[0]
        hashes[begins] = _extended(hashes[begins], raw, letters[begins + length - 1], letter_bytes[begins + length - 1])
        if length >= first:
            chosen = begins[~is_edge[begins]] if length == 1 else begins
            buckets[chosen, length - first] = hashes[chosen] % np.uint32(ngrams.num_buckets)
    if ngrams.without in words:
        buckets[np.array([word == ngrams.without for word in words])[word_of]] = -1
    is_there = buckets >= 0
    counts = np.bincount(word_of, is_there.sum(axis=1), minlength=len(words)).astype(np.int64)
    return buckets[is_there], counts


def are_usable(vectors: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the words with a usable vector: they have n-grams (``counts``), and no value overflowed."""
    return (counts > 0) & np.isfinite(vectors).all(axis=1)


def _extended(
    hashes: NDArray[np.uint32], raw: NDArray[np.uint8], letters: NDArray[np.int64], letter_bytes: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Return the hashes of n-grams, each extended by one letter.

    The letters begin at the indexes ``letters`` of ``raw`` and have ``letter_bytes`` bytes.
    """
    for number in range(int(letter_bytes.max(initial=0))):
        longer = (letter_bytes > number).nonzero()[0]
        hashes[longer] = (hashes[longer] ^ _SIGN_EXTENDED[raw[letters[longer] + number]]) * _FNV_PRIME
    return hashes


@np.errstate(over="ignore", invalid="ignore")
def sums(
    words: list[bytes],
    own_rows: NDArray[np.int64] | None,
    first_ngram_row: int,
    ngrams: Ngrams,
    matrices: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Sum for each word the vector of its own row and the vectors of its n-grams, in this order, in float32.

    fastText and gensim sum in the same way. Values that overflow float32 become infinite.

    Args:
        words: the words.
        own_rows: the index of each word's own row in the first matrix, (words,); ``None`` for words without one.
        first_ngram_row: the row of the first bucket in the second matrix.
        ngrams: the n-grams of the model.
        matrices: the matrices of words and of n-grams, (rows, dimension). They may be mapped: only needed rows are
            read, in file order, some MiB at a time.

    Returns:
        the sums (words, dimension), and the number of vectors in each sum (words,).
    """
    own, matrix = matrices
    total = np.zeros((len(words), matrix.shape[1]), np.float32)
    counts = np.zeros(len(words), np.int64)
    for begin in range(0, len(words), _WORDS_AT_ONCE):
        some = slice(begin, begin + _WORDS_AT_ONCE)
        if own_rows is not None:
            total[some] += own[own_rows[some]]
            counts[some] += 1
        buckets, num_ngrams = buckets_of(words[some], ngrams)
        counts[some] += num_ngrams
        _add_rows(total[some], buckets + first_ngram_row, np.repeat(np.arange(len(num_ngrams)), num_ngrams), matrix)
    return total, counts


def _add_rows(
    total: NDArray[np.float32], rows: NDArray[np.int64], owners: NDArray[np.int64], matrix: NDArray[np.float32]
) -> None:
    """Add row ``rows[i]`` of the matrix to row ``owners[i]`` of ``total``, for each i in increasing order.

    ``np.add.reduceat`` would add in another order, which changes the rounding.
    """
    num_at_once = max(_ROWS_AT_ONCE_BYTES // (4 * matrix.shape[1]), 1)
    for begin in range(0, len(rows), num_at_once):
        asked, places = np.unique(rows[begin : begin + num_at_once], return_inverse=True)
        vectors = np.asarray(matrix[asked], np.float32)
        of = owners[begin : begin + num_at_once]
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        lengths = np.diff(starts, append=len(of))
        order = np.argsort(-lengths, kind="stable")
        starts, lengths = starts[order], lengths[order]
        for number in range(int(lengths[0])):
            some = starts[: np.searchsorted(-lengths, -number)]  # the words with more than `number` n-grams
            total[of[some]] += vectors[places[some + number]]
