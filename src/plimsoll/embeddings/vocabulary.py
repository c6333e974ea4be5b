"""The words that vectors are wanted for, in the order of the rows they get, and how often each is used.

From a file with a word per line (a tab and more may follow: BERT's ``vocab.txt``, counts), a tokenizer, counted words,
or any iterable. The row of a line is its number, counted from 0; an empty one stands for no word. Rows of a tokenizer
are its ids; a token that begins a word (``Ġthe``, ``▁the``) stands for that word, one that goes on inside of a word
(``##ing``) or is special for none.
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
_BYTES_BEGIN, _SPACE = "Ġ", "▁"  # a space, as byte-level BPE and SentencePiece spell it
_MARKED_SHARE = 0.05  # of the tokens of a tokenizer that does not say how it spells
_INSIDE = "##"
_MOST_EMPTY_ROWS = 10_000


@dataclass(frozen=True)
class Vocabulary:
    """Words, one per row.

    Attributes:
        words: the word of each row; ``None``: the row stands for no word.
        name: where they are from, for messages.
        counts: how often each is used; ``None``: not known.
        padding: the row that stays zero, if any.
        num_other_tokens: uses of words that have no row.
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
        """A hash of everything a row depends on."""
        return hashlib.sha256(json.dumps([self.padding, *self.words]).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def vocabulary_of(source: Any, padding: str | None = None) -> Vocabulary:
    """Make the vocabulary of whatever names words.

    Args:
        source: a path to a file with a word per line or to a ``tokenizer.json``; a tokenizer of ``tokenizers`` or
            ``transformers``; a ``collections.Counter``; a dictionary from words to their rows; a `Vocabulary`; or an
            iterable of words that has an order.
        padding: the word whose row is for padding; it must be one of them.

    Raises:
        EmbeddingError: if there are no words, one occurs twice, they have no order, or ``padding`` is none of them.
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
    """Return the words by their rows, which are the values."""
    numbers = list(rows.values())
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or len({*numbers}) != len(numbers):
        raise EmbeddingError(
            f"a dictionary of {len(rows):,} words whose values are not their rows, each another: give a list, or a "
            "collections.Counter of how often each is used"
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
    """Make the vocabulary of counted words: a row for padding, one for unknown words, then the most frequent first.

    Args:
        counts: words and how often each is used, the most frequent first.
        name: where they are from.
        max_words: most words; ``None``: all.
        min_count: words used less often are unknown words.

    Raises:
        EmbeddingError: if no word is left.
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
    """Make the vocabulary of a tokenizer, a row per id.

    Args:
        tokenizer: one of ``tokenizers`` or ``transformers``.
        name: where it is from.
        padding: the token whose row is for padding; ``None``: what the tokenizer says, if it does.

    Raises:
        EmbeddingError: if it has no tokens, or ``padding`` is none of them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    ids: dict[str, int] = tokenizer.get_vocab()
    if not ids:
        raise EmbeddingError(f"{name} has 0 tokens: give one that is trained")
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
        raise EmbeddingError(f"{padding!r} is no token of {name}: name one of its tokens as padding, or leave it out")
    return Vocabulary(words, name, padding=None if padding is None else ids[padding])


def said_padding(path: Path) -> str | None:
    """Return the token for padding that is named beside a tokenizer: in its folder, or that of its file."""
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
    """Return what tokens that begin a word begin with; ``None``: nothing tells them from others."""
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
    """Undo the spelling of GPT-2, in which each byte is a letter."""
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
        raise EmbeddingError(f"{file} is no tokenizer of the `tokenizers` library ({error}): give another") from None
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
        raise EmbeddingError(f"{padding!r} is none of the words of {name}: add it, or leave padding out")
    return words.index(padding)
