"""Training of byte-level BPE in bounded memory, for any texts.

Hugging Face ``tokenizers`` stores each distinct word and the places of each pair of its bytes. This takes about 150
bytes of memory per byte of distinct words (measured, `docs/LOG.md`): several GiB for 64 MiB of numbers, hashes or
Chinese. This module therefore counts the words first. If the distinct words exceed `most_distinct_bytes`, the rarest
are dropped; among equally rare words, those with the larger hash are dropped first. Otherwise no word is dropped, and
the tokenizer is byte-identical to the library's own. Training that would exceed the budget or a process limit is
refused in advance, because the library would abort the process.

A word is a word of the ``ByteLevel`` pre-tokenizer. ASCII texts are split by a regular expression with the same result.
Other texts are split at white space and counted first, so that each distinct chunk is split into words only once.
"""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from plimsoll.errors import TokenizerMemoryError
from plimsoll.records.units import format_bytes

if TYPE_CHECKING:
    import tokenizers

_LEAST_DISTINCT_BYTES, _DISTINCT_BYTES_PER_TOKEN = 1 << 20, 32
_BYTES_PER_DISTINCT_BYTE, _COUNTED_BYTES_PER_DISTINCT_BYTE = 160, 70
_LEAST_PEAK_BYTES = 8 << 20  # smaller peaks are not checked against the budget
_MOST_CHUNKS, _MOST_CHUNK_CHARACTERS = 1 << 16, 8 << 20
_WORDS_PER_CHECK = 1 << 14
_FED_CHARACTERS = 16 << 10
# The regular expression of GPT-2, which the library uses, restricted to ASCII, and the library's white space. A space
# before a word belongs to the word.
_ASCII_WORD = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CHUNK = re.compile(rf" ?[^{_WHITE}]+|[{_WHITE}]+(?![^{_WHITE}])|[{_WHITE}]")


class TrainedOn(NamedTuple):
    """The distinct words of the training texts: their number, their size in bytes, and the number of dropped words."""

    num_words: int
    num_bytes: int
    num_left_out: int


def most_distinct_bytes(vocab_size: int) -> int:
    """Return the maximum size in bytes of the distinct words on which a vocabulary of this size is trained."""
    return max(_LEAST_DISTINCT_BYTES, _DISTINCT_BYTES_PER_TOKEN * vocab_size)


def peak_bytes(num_distinct_bytes: int) -> int:
    """Return an upper bound of the memory that training needs in addition to the distinct words, in bytes.

    ``num_distinct_bytes`` is the size of the distinct words.
    """
    return _BYTES_PER_DISTINCT_BYTE * num_distinct_bytes


def whole_bytes(num_distinct_bytes: int) -> int:
    """Return an upper bound of the memory in bytes of counting distinct words of this size and training on them."""
    return peak_bytes(num_distinct_bytes) + _COUNTED_BYTES_PER_DISTINCT_BYTE * num_distinct_bytes


def train(
    backend: tokenizers.Tokenizer,
    texts: Iterable[str],
    trainer: Any,
    vocab_size: int,
    budget_bytes: int | None = None,
) -> TrainedOn:
    """Train a tokenizer with the pre-tokenizer ``ByteLevel``.

    Args:
        backend: the tokenizer, trained in place.
        texts: the texts to train on.
        trainer: the trainer of the ``tokenizers`` library.
        vocab_size: the size of the vocabulary in tokens; it limits the distinct words.
        budget_bytes: the private memory that this process may use in bytes, or ``None`` for no budget.

    Raises:
        TokenizerMemoryError: if training exceeds the budget for private memory or a limit on this process.
    """
    from tokenizers import pre_tokenizers

    byte_level = backend.pre_tokenizer
    words, num_left_out = count_words(texts, byte_level, most_distinct_bytes(vocab_size))
    num_bytes = sum(map(len, words))
    _require_memory(num_bytes, budget_bytes)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # words in byte-level letters hold no white space
    backend.train_from_iterator(_repeated(words), trainer)
    backend.pre_tokenizer = byte_level
    return TrainedOn(len(words), num_bytes, num_left_out)


def count_words(texts: Iterable[str], byte_level: Any, most_bytes: int) -> tuple[Counter[str], int]:
    """Count the words of texts. Return the counts of words in byte-level letters, and the number of dropped words.

    If words were dropped, counts may be too small. Memory: words of up to twice ``most_bytes`` bytes, and 64 Ki chunks.
    """
    counting = _Counting(byte_level, most_bytes)
    for text in texts:
        counting.add(text)
    return counting.counted()


class _Counting:
    """Counts of words: ASCII words as they are, other words in byte-level letters."""

    def __init__(self, byte_level: Any, most_bytes: int) -> None:
        self._byte_level, self._most_bytes = byte_level, most_bytes
        self._words: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()
        self._num_characters = self._num_left_out = self._num_checked = 0

    def add(self, text: str) -> None:
        """Count the words of a text."""
        if text.isascii():
            self._words.update(_ASCII_WORD.findall(text))
        else:
            self._chunks.update(_CHUNK.findall(text))
            self._num_characters += len(text)
            if len(self._chunks) > _MOST_CHUNKS or self._num_characters > _MOST_CHUNK_CHARACTERS:
                self._cut_chunks()
        if len(self._words) > self._num_checked + _WORDS_PER_CHECK:
            self._bound(2 * self._most_bytes)

    def counted(self) -> tuple[Counter[str], int]:
        """Return the counts of all words, and the number of dropped words."""
        self._cut_chunks()
        spelt: Counter[str] = Counter()
        while self._words:
            word, count = self._words.popitem()
            spelt[word if word.isalnum() else self._spelt(word)] += count
        self._words = spelt
        self._bound(self._most_bytes)
        return self._words, self._num_left_out

    def _spelt(self, word: str) -> str:
        return "".join(piece for piece, _ in self._byte_level.pre_tokenize_str(word)) if word.isascii() else word

    def _cut_chunks(self) -> None:
        for chunk, count in self._chunks.items():
            if chunk.isascii():
                for word in _ASCII_WORD.findall(chunk):
                    self._words[word] += count
            else:
                for word, _ in self._byte_level.pre_tokenize_str(chunk):
                    self._words[word] += count
        self._chunks, self._num_characters = Counter(), 0

    def _bound(self, most_bytes: int) -> None:
        if sum(map(len, self._words)) > most_bytes:
            self._num_left_out += _leave_out_rarest(self._words, self._most_bytes)
        self._num_checked = len(self._words)


def _leave_out_rarest(words: Counter[str], most_bytes: int) -> int:
    """Drop the rarest words until the others have at most ``most_bytes`` bytes. Return the number of dropped words."""
    ranked = sorted(words, key=lambda word: (-words[word], xxhash.xxh3_64_intdigest(word.encode())))
    num_bytes = 0
    for number, word in enumerate(ranked):
        num_bytes += len(word)
        if num_bytes > most_bytes:
            for other in ranked[number:]:
                del words[other]
            return len(ranked) - number
    return 0


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yield each word as often as it occurs, because the library takes texts and not counts."""
    for word in sorted(words):
        at_once = max(_FED_CHARACTERS // (len(word) + 1), 1)
        for begin in range(0, words[word], at_once):
            yield f"{word} " * min(at_once, words[word] - begin)


def _require_memory(num_distinct_bytes: int, budget_bytes: int | None) -> None:
    needed_bytes = peak_bytes(num_distinct_bytes)
    if needed_bytes < _LEAST_PEAK_BYTES:
        budget_bytes = None
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident, shared, _, _, data, _ = (int(pages) * resource.getpagesize() for pages in file.read().split())
    limits = [
        ("RLIMIT_DATA", resource.getrlimit(resource.RLIMIT_DATA)[0], data),
        ("RLIMIT_AS", resource.getrlimit(resource.RLIMIT_AS)[0], size),
        ("the budget", resource.RLIM_INFINITY if budget_bytes is None else budget_bytes, resident - shared),
    ]
    for name, limit_bytes, used_bytes in limits:
        if limit_bytes != resource.RLIM_INFINITY and used_bytes + needed_bytes > limit_bytes:
            raise TokenizerMemoryError(
                f"training the tokenizer takes about {format_bytes(needed_bytes)}, and {name} of "
                f"{format_bytes(limit_bytes)} has {format_bytes(max(limit_bytes - used_bytes, 0))} left: raise it, or "
                "give an existing tokenizer with tokenizer.path",
                budget_bytes if name == "the budget" else None,
            )
