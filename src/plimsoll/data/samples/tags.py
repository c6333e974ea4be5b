"""The tags of words, and the labels of tokens that words are split into.

Words are tokenized one by one, so a token never spans two words. The label of a word is on its first token; its other
tokens have no label, as is usual in token classification. A word for which the tokenizer returns no token is dropped
with its tag, and counted. A word with the tag -100 has no label. Tags may mark named entities (O, B-X, I-X, also E-X
and S-X). For labels in windows, see `plimsoll.data.samples.texts`. Not handled: labels on all tokens of a word, several
tags per word.

Shapes: N tokens, W words.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.formats.helpers.columns import listed, refuse_unknown
from plimsoll.data.formats.tagged import NO_TAG, words_and_tags
from plimsoll.data.samples import ragged
from plimsoll.data.text.corpus import Corpus
from plimsoll.errors import DataError

if TYPE_CHECKING:
    import tokenizers

NO_LABEL = -100  # equals plimsoll.data.samples.windows.IGNORED_LABEL, whose module imports torch
INSIDE_WORD = -101  # in a store: the token is not the first of its word, and has no label
OUTSIDE = "O"
_PREFIXES = ("B-", "I-", "E-", "S-")
_PIECE_WORDS = 8192


def tags_of(corpus: Corpus, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the tags, sorted: numbers by value, other names alphabetically.

    Args:
        corpus: texts that were opened with ``Reading(is_tagged=True)``.
        names: the known tags, such as the tags of the training texts. They are checked and returned. ``None``: the
            tags are collected from ``corpus``.

    Raises:
        DataError: if there are fewer than 2 tags, or a tag of the texts is not in ``names``.
    """
    own = tuple(corpus.tag_counts)
    if not own:
        raise DataError(
            f"no word of the {len(corpus)} texts has a tag ({NO_TAG} means no tag): give the column with the tags"
        )
    known = own if names is None else tuple(names)
    if len(known) < 2:
        raise DataError(
            f"token-classification needs at least 2 tags, but all words of the {len(corpus)} texts have {known[0]!r}: "
            "give the column with the tags, or texts with other tags"
        )
    of_training = "the training data has"
    refuse_unknown(own, known, "the words of the validation data have the tags", of_training)
    return known


def are_of_entities(names: Sequence[str]) -> bool:
    """Return whether the tags describe entities, that is, all are O or have a prefix such as B- or I-."""
    return any(name != OUTSIDE for name in names) and not _without_prefix(names)


def entity_note(names: Sequence[str]) -> str | None:
    """Return why entity F1 is not computed if only some tags have an entity prefix; ``None`` if all or no tags do."""
    others = _without_prefix(names)
    if not others or not any(name.startswith(_PREFIXES) for name in names):
        return None
    return (
        f"entity F1 is left out, because some tags have a prefix ({', '.join(_PREFIXES)}) and some have none: name "
        f"{listed(others)} with a prefix, such as B-{others[0]} and I-{others[0]}, or {OUTSIDE}, to get entity F1"
    )


def _without_prefix(names: Sequence[str]) -> list[str]:
    return [name for name in names if name != OUTSIDE and not name.startswith(_PREFIXES)]


class Words(NamedTuple):
    """The words of a text or of a part of a text, and the indices of their tags.

    ``is_last`` marks the last part of a text. ``num_bytes`` is the part's share of the bytes of the stored text.
    """

    words: list[str]
    tags: list[int]
    is_last: bool
    num_bytes: int


def tagged_words(corpus: Corpus, first_text: int = 0) -> Iterator[Words]:
    """Yield the words of texts in order, at most `_PIECE_WORDS` at a time.

    Splitting a text in this way does not change its tokens, because each word is tokenized by itself.
    """
    numbers = {name: number for number, name in enumerate(corpus.tag_counts)} | {NO_TAG: NO_LABEL}
    for text in corpus.tagged(first_text):
        words, names = words_and_tags(text)
        tags = [numbers[name] for name in names]
        num_bytes = len(text) if text.isascii() else len(text.encode())
        for begin in range(0, len(words), _PIECE_WORDS):
            end = begin + _PIECE_WORDS
            num_words = len(words[begin:end])
            yield Words(words[begin:end], tags[begin:end], end >= len(words), num_bytes * num_words // len(words))


class Encoded(NamedTuple):
    """Tokens end to end (N,), the number of tokens of each text or piece, and labels (N,) if words have tags.

    ``num_lost_words`` is the number of words for which the tokenizer returned no token. ``marks`` (N,) mark the
    beginnings of sentences and paragraphs, if requested.
    """

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    num_lost_words: int = 0
    marks: NDArray[np.uint8] | None = None


class WordEncoder:
    """An encoder of single words, each encoded as the tokenizer encodes it after another word.

    A byte-level tokenizer returns different tokens for a word with and without a preceding space. The constructor tests
    whether this tokenizer does so. Each distinct word is encoded once per call.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        both, alone, spaced = (backend.encode(text, add_special_tokens=False).ids for text in ("a b", "b", " b"))
        self._before = " " if spaced != alone and both[-len(spaced) :] == spaced else ""

    def encode(self, pieces: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the tokens of all words of all pieces (N,), and the number of tokens of each word (W,)."""
        numbers: dict[str, int] = {}
        places_W = np.array([numbers.setdefault(word, len(numbers)) for words in pieces for word in words], np.int64)
        texts = [self._before + word for word in numbers]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        tokens = array("I")
        lengths = np.zeros(len(numbers), np.int64)
        for number, encoding in enumerate(encodings):
            if texts[number] != self._before:  # an empty word must not become a space
                tokens.fromlist(encoding.ids)
                lengths[number] = len(encoding)
        begins = np.cumsum(lengths) - lengths
        flat = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        return flat[ragged.places(begins[places_W], lengths[places_W])], lengths[places_W]

    def labelled(self, pieces: Sequence[Words]) -> Encoded:
        """Return the tokens of pieces, with the label of each token."""
        tokens_N, lengths_W = self.encode([piece.words for piece in pieces])
        tags_W = np.array([tag for piece in pieces for tag in piece.tags], np.int64)
        labels_N = np.full(len(tokens_N), INSIDE_WORD, np.int64)
        has_token_W = lengths_W > 0
        labels_N[(np.cumsum(lengths_W) - lengths_W)[has_token_W]] = tags_W[has_token_W]
        stops = np.cumsum([len(piece.words) for piece in pieces])
        before = np.concatenate(([0], np.cumsum(lengths_W)))[np.concatenate(([0], stops))]
        return Encoded(tokens_N, np.diff(before), labels_N, int(np.count_nonzero(~has_token_W)))
