"""The words of a table of vectors in row order, and how often each word is used.

Sources are a file with a word per line, such as BERT's ``vocab.txt``, a tokenizer, counted words, or any iterable of
words. In a file, rows are line numbers from 0, and an empty line is a row without a word. A tab and the text after it
are ignored. In a tokenizer, rows are ids. A token that begins a word (``Ġthe``, ``▁the``) stands for that word. A token
that continues a word (``##ing``) and a special token stand for no word.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import EmbeddingError

PADDING, UNKNOWN = "<pad>", "<unk>"
_BYTES_BEGIN, _SPACE = "Ġ", "▁"  # the prefix that stands for a space: in byte-level BPE, in SentencePiece
_MARKED_SHARE = 0.05  # a prefix of more than this share of tokens marks words, if the tokenizer names no prefix
_INSIDE = "##"
_MOST_EMPTY_ROWS = 10_000


@dataclass(frozen=True)
class Vocabulary:
    """Words, one per row.

    Attributes:
        words: the word of each row; ``None`` for a row without a word.
        name: the source of the words, for messages.
        counts: the number of uses of each word; ``None`` if unknown.
        padding: the index of the row that stays zero; ``None`` if there is no such row.
        num_other_tokens: the number of uses of words that have no row.
    """

    words: Sequence[str | None]
    name: str
    counts: NDArray[np.int64] | None = None
    padding: int | None = None
    num_other_tokens: int = 0

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def key(self) -> str:
        """A hash of the words and the padding row, which determine the rows of a table."""
        return hashlib.sha256(json.dumps([self.padding, *self.words]).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def vocabulary_of(source: Any, padding: str | None = None) -> Vocabulary:
    """Make a vocabulary from any source of words.

    Args:
        source: a path to a file with a word per line or to a ``tokenizer.json``; a tokenizer of ``tokenizers`` or
            ``transformers``; a ``collections.Counter``; a dictionary from words to rows; a `Vocabulary`; or an ordered
            iterable of words.
        padding: the word whose row is for padding; it must be one of the words. ``None``: the tokenizer's padding
            token, if ``source`` is a tokenizer that has one.

    Raises:
        EmbeddingError: if there are no words, a word occurs twice, the words have no order, or ``padding`` is not one
            of them.
    """
    if isinstance(source, Vocabulary):
        return source if padding is None else replace(source, padding=_row_of(padding, source.words, source.name))
    if isinstance(source, str | Path):
        return _from_path(Path(source), padding)
    if hasattr(source, "get_vocab"):
        return of_tokenizer(source, "the tokenizer", padding)
    if isinstance(source, Counter):
        return _of_words(list(source), "the words", padding, np.fromiter(source.values(), np.int64, len(source)))
    if isinstance(source, Mapping):
        return _of_words(_by_row(source), "the words", padding)
    if isinstance(source, set | frozenset):
        raise EmbeddingError(
            f"a set of {len(source):,} words has no order for the rows: give a list, as of sorted(words)"
        )
    return _of_words(list(source), "the words", padding)


def _by_row(rows: Mapping[str, Any]) -> list[str | None]:
    """Return the words of a dictionary in the order of its values, their row indexes; ``None`` for unused rows.

    Raises:
        EmbeddingError: if the values are not distinct row indexes, or are much larger than the number of words.
    """
    numbers = list(rows.values())
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or len({*numbers}) != len(numbers):
        raise EmbeddingError(
            f"a dictionary of {len(rows):,} words needs a different row number as the value of each word: give a "
            "list, or a collections.Counter of how often each is used"
        )
    if numbers and max(numbers) > 2 * len(numbers) + _MOST_EMPTY_ROWS:
        raise EmbeddingError(
            f"the rows of {len(rows):,} words go up to {max(numbers):,}: give a list, or a collections.Counter"
        )
    words: list[str | None] = [None] * (1 + max(numbers, default=-1))
    for word, number in rows.items():
        words[number] = word
    return words


def of_counts(counts: Iterable[tuple[str, int]], name: str, max_words: int | None, min_count: int) -> Vocabulary:
    """Make a vocabulary from counted words: ``<pad>``, ``<unk>``, then the words, most frequent first.

    Args:
        counts: words with their counts, most frequent first.
        name: the source of the words, for messages.
        max_words: maximum number of words; ``None``: no maximum.
        min_count: words used less often get no row.

    Raises:
        EmbeddingError: if no words remain.
    """
    words: list[str | None] = [PADDING, UNKNOWN]
    uses, others = [0, 0], 0
    for word, count in counts:
        is_kept = count >= min_count and (max_words is None or len(words) - 2 < max_words) and word not in words[:2]
        if is_kept:
            words.append(word)
            uses.append(count)
        else:
            others += count
    if len(words) == 2:
        raise EmbeddingError(f"no word of {name} is used {min_count} times or more: lower --min-count")
    return Vocabulary(words, name, np.array(uses), 0, others)


def of_tokenizer(tokenizer: Any, name: str, padding: str | None = None) -> Vocabulary:
    """Make a vocabulary from a tokenizer, with one row per id.

    Args:
        tokenizer: a tokenizer of ``tokenizers`` or ``transformers``.
        name: the source of the tokenizer, for messages.
        padding: the token whose row is for padding; ``None``: the tokenizer's padding token, if it has one.

    Raises:
        EmbeddingError: if the tokenizer has no tokens, or ``padding`` is not one of its tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    ids: dict[str, int] = tokenizer.get_vocab()
    if not ids:
        raise EmbeddingError(f"{name} has 0 tokens: give a trained tokenizer")
    words: list[str | None] = [None] * (1 + max(ids.values()))
    begin = _begin_of_words(backend, ids)
    for token, number in ids.items():
        words[number] = _word_of(token, begin)
    if hasattr(backend, "get_added_tokens_decoder"):
        for number, added in backend.get_added_tokens_decoder().items():
            words[number] = None if added.special else str(added.content)
    said = getattr(backend, "padding", None) or {}
    padding = padding or getattr(tokenizer, "pad_token", None) or said.get("pad_token")
    if padding is not None and padding not in ids:
        raise EmbeddingError(
            f"{padding!r} is not a token of {name}: name one of its tokens as padding, or leave it out"
        )
    return Vocabulary(words, name, padding=None if padding is None else ids[padding])


def said_padding(path: Path) -> str | None:
    """Return the padding token from the configuration files in a tokenizer's folder; ``None`` if they name no token.

    ``path`` is the folder, or a file in it.
    """
    folder = path if path.is_dir() else path.parent
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            said = json.loads((folder / name).read_bytes()).get("pad_token")
        except (OSError, ValueError, AttributeError):
            continue
        if said:
            return str(said["content"] if isinstance(said, dict) else said)
    return None


def _begin_of_words(backend: Any, ids: Mapping[str, int]) -> str | None:
    """Return the prefix that marks tokens at the beginning of a word; ``None`` if the tokenizer has no such prefix."""
    parts = [getattr(backend, name, None) for name in ("decoder", "pre_tokenizer", "normalizer")]
    described = " ".join(repr(part) for part in parts if part is not None)
    if described:
        return _BYTES_BEGIN if "ByteLevel" in described else _SPACE if _SPACE in described else None
    shares = {begin: sum(map(_begins_with(begin), ids)) / len(ids) for begin in (_BYTES_BEGIN, _SPACE)}
    begin = max(shares, key=lambda each: shares[each])
    return begin if shares[begin] > _MARKED_SHARE else None


def _begins_with(begin: str) -> Callable[[str], bool]:
    return lambda token: token.startswith(begin) and len(token) > 1


def _word_of(token: str, begin: str | None) -> str | None:
    if begin is None:
        return None if token.startswith(_INSIDE) else token
    if not token.startswith(begin):
        return None
    return (_spelled(token) if begin == _BYTES_BEGIN else token)[1:] or None


def _spelled(token: str) -> str:
    """Return the text of a token of byte-level BPE, which represents each byte by a letter."""
    from tokenizers.decoders import ByteLevel

    spelled: str = ByteLevel().decode([token])
    return spelled


def _from_path(path: Path, padding: str | None) -> Vocabulary:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise EmbeddingError(
            f"cannot read the vocabulary {file} ({error.strerror}): give a file with a word per line, or a "
            "tokenizer.json"
        ) from None
    except UnicodeDecodeError as error:
        raise EmbeddingError(f"the vocabulary {file} is not UTF-8 (byte {error.start}): convert it") from None
    if file.suffix == ".json":
        return _from_tokenizer_file(file, padding)
    lines = [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")] if text.strip() else []
    return _of_words([line.split("\t", 1)[0] or None for line in lines], str(file), padding)


def _from_tokenizer_file(file: Path, padding: str | None) -> Vocabulary:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except ValueError as error:
        raise EmbeddingError(f"{file} is not a tokenizer of the `tokenizers` library ({error}): give another") from None
    return of_tokenizer(backend, str(file), padding or said_padding(file))


def _of_words(
    words: list[str | None], name: str, padding: str | None, counts: NDArray[np.int64] | None = None
) -> Vocabulary:
    if not words:
        raise EmbeddingError(f"{name} holds 0 words: give at least one")
    wrong = next((word for word in words if not isinstance(word, str | None)), None)
    if wrong is not None:
        raise EmbeddingError(f"{name} holds {wrong!r}, a {type(wrong).__name__}: give words as str")
    rows = {word: row for row, word in enumerate(words) if word is not None}
    if len(rows) < len(words) - words.count(None):
        twice = next(word for row, word in enumerate(words) if word is not None and rows[word] != row)
        raise EmbeddingError(f"{name} has the word {twice!r} more than once: remove all but one of its rows")
    return Vocabulary(words, name, counts, None if padding is None else _row_of(padding, words, name))


def _row_of(padding: str, words: Sequence[str | None], name: str) -> int:
    if padding not in words:
        raise EmbeddingError(f"{padding!r} is not one of the words of {name}: add it, or leave padding out")
    return words.index(padding)
