"""The tags of words: which there are, and what becomes of them where words are cut into tokens.

Words are tokenized one by one, so a token never reaches over the end of a word; the label of a word is that of its
first token, and all others have none, as is usual for models of tokens. A word that the tokenizer makes nothing of is
lost with its tag, and counted; one whose tag is -100 has no label. Tags may be those of entities (O, B-X, I-X, also E-X
and S-X). What becomes of labels in windows is in `plimsoll.data.samples.texts`. NOT covered: labels of all tokens of a
word, several tags of a word.

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

NO_LABEL = -100  # plimsoll.data.samples.windows.IGNORED_LABEL, which comes with torch
INSIDE_WORD = -101  # in a store: the token is not the first of its word, and has no label
OUTSIDE = "O"
_PREFIXES = ("B-", "I-", "E-", "S-")
_PIECE_WORDS = 8192


def tags_of(corpus: Corpus, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the tags in their order: numbers by value, all else by the alphabet.

    Args:
        corpus: texts that were opened with ``Reading(is_tagged=True)``.
        names: the tags that are known already (those of the training texts).

    Raises:
        DataError: if there are fewer than 2, or one that is not among ``names``.
    """
    own = tuple(corpus.tag_counts)
    if not own:
        raise DataError(
            f"no word of the {len(corpus)} texts has a tag, for {NO_TAG} means none: give the column with the tags"
        )
    known = own if names is None else tuple(names)
    if len(known) < 2:
        raise DataError(
            f"token-classification needs at least 2 tags, but all words of the {len(corpus)} texts have {known[0]!r}: "
            "give the column with the tags, or texts with others"
        )
    of_training = "those of the training data"
    refuse_unknown(own, known, "the words of the validation data have the tags", of_training)
    return known


def are_of_entities(names: Sequence[str]) -> bool:
    """Return whether all tags are O or those of the begin, the inside, the end or the whole of an entity."""
    return any(name != OUTSIDE for name in names) and not _without_prefix(names)


def entity_note(names: Sequence[str]) -> str | None:
    """Return why whole entities are not judged although some tags look as if there were some; ``None``: none does."""
    others = _without_prefix(names)
    if not others or not any(name.startswith(_PREFIXES) for name in names):
        return None
    return (
        f"entity F1 is left out, because some tags have a prefix ({', '.join(_PREFIXES)}) and some have none: name "
        f"{listed(others)} as those, such as B-{others[0]} and I-{others[0]}, or {OUTSIDE}, to have it"
    )


def _without_prefix(names: Sequence[str]) -> list[str]:
    return [name for name in names if name != OUTSIDE and not name.startswith(_PREFIXES)]


class Words(NamedTuple):
    """Words of one text, or of a part of one, and the numbers of their tags."""

    words: list[str]
    tags: list[int]
    is_last: bool
    num_bytes: int


def tagged_words(corpus: Corpus, first_text: int = 0) -> Iterator[Words]:
    """Yield the words of texts in order, at most some thousand at a time, which changes no token."""
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
    """Tokens end to end (N,), how many of them each text or piece has, and their labels where words have tags (N,).

    ``num_lost_words`` have no token. ``marks`` say where sentences and paragraphs begin, where that is asked for (N,).
    """

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    num_lost_words: int = 0
    marks: NDArray[np.uint8] | None = None


class WordEncoder:
    """Encodes words one by one, each as the tokenizer spells it behind another word.

    A byte-level tokenizer has other tokens for a word with a space before it than without; what it does is found out by
    trying. Each word is encoded once for all its occurrences.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        both, alone, spaced = (backend.encode(text, add_special_tokens=False).ids for text in ("a b", "b", " b"))
        self._before = " " if spaced != alone and both[-len(spaced) :] == spaced else ""

    def encode(self, pieces: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the tokens of all words of all pieces (N,), and how many each word has (W,)."""
        numbers: dict[str, int] = {}
        places_W = np.array([numbers.setdefault(word, len(numbers)) for words in pieces for word in words], np.int64)
        texts = [self._before + word for word in numbers]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        tokens = array("I")
        lengths = np.zeros(len(numbers), np.int64)
        for number, encoding in enumerate(encodings):
            if texts[number] != self._before:  # a word of no characters is not a space
                tokens.fromlist(encoding.ids)
                lengths[number] = len(encoding)
        begins = np.cumsum(lengths) - lengths
        flat = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        return flat[ragged.places(begins[places_W], lengths[places_W])], lengths[places_W]

    def labelled(self, pieces: Sequence[Words]) -> Encoded:
        """Return the tokens of pieces with their labels."""
        tokens_N, lengths_W = self.encode([piece.words for piece in pieces])
        tags_W = np.array([tag for piece in pieces for tag in piece.tags], np.int64)
        labels_N = np.full(len(tokens_N), INSIDE_WORD, np.int64)
        has_token_W = lengths_W > 0
        labels_N[(np.cumsum(lengths_W) - lengths_W)[has_token_W]] = tags_W[has_token_W]
        stops = np.cumsum([len(piece.words) for piece in pieces])
        before = np.concatenate(([0], np.cumsum(lengths_W)))[np.concatenate(([0], stops))]
        return Encoded(tokens_N, np.diff(before), labels_N, int(np.count_nonzero(~has_token_W)))
