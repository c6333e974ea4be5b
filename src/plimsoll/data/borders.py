"""Windows that end where a sentence or a paragraph does, found in the tokens alone, with no text at hand.

What can be said of a token by itself (it ends a sentence, it begins a word, it breaks a line) is a table of flags over
the vocabulary, made once from the tokenizer; a border is then a few bit operations on tokens and their neighbours.

A sentence ends after ``. ! ? …`` and closing quotes and brackets, if a new word follows that does not begin with a
small letter, or after the full-width signs of these; and where a paragraph does. A single capital before a full stop
ends none, and a digit after "digit." begins none. A paragraph ends at a blank line. So "e.g. this", "3.14" and "U.S.
Army" hold no border. NOT covered: other abbreviations before a capital letter ("Mr. Smith" is cut), headings and lists
without a blank line, signs that a byte-level tokenizer spreads over several tokens (rare ones), closing quotes that a
tokenizer without spaces (WordPiece) makes look like opening ones, languages without such signs. A wrong border moves
the end of a window, it loses nothing.

Shapes: N tokens of one pass, C places where a window may begin or end, V vocabulary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.data import ragged
from plimsoll.data.tokens import Tokens
from plimsoll.errors import DataError

if TYPE_CHECKING:  # preparing needs the library, the training process has only the tables
    import tokenizers

BorderKind = Literal["sentence", "paragraph"]

_TOKENS_PER_PASS = 1 << 20
_MOST_TRAILING = 16  # tokens of closing quotes, brackets or blanks that are followed from a sign to its border

# Flags of a token, by its text in the middle of a line.
_ENDS, _ENDS_FREELY, _TRAILS, _QUOTES, _BLANK, _ENDS_BLANK = (1 << bit for bit in range(6))
_BEGINS_WORD, _IS_SMALL, _IS_CAPITAL, _ENDS_DIGIT, _BEGINS_DIGIT, _BREAKS, _BREAKS_TWICE = (
    1 << bit for bit in range(6, 13)
)
_CLOSERS = r")\]}»”’›」』）】"  # these close, whatever stands before them; straight quotes only right after a word
_PATTERNS = {
    _ENDS: rf"((?<!\b[A-Z])\.|[!?…。！？])[\"'{_CLOSERS}]*\s*\Z",
    _ENDS_FREELY: rf"[。！？][\"'{_CLOSERS}]*\s*\Z",  # no space follows these
    _TRAILS: rf"\A\s*[{_CLOSERS}][\"'{_CLOSERS}]*\s*\Z|\A\s+\Z",
    _QUOTES: rf"\A[\"'][\"'{_CLOSERS}]*\s*\Z",
    _BLANK: r"\A\s+\Z",
    _ENDS_BLANK: r"\s\Z",
    _BEGINS_WORD: rf"\A\s+[^{_CLOSERS}\s]",
    _ENDS_DIGIT: r"\d\Z",
    _BEGINS_DIGIT: r"\A\s*\d",
    _BREAKS: r"\n\s*\Z",
    _BREAKS_TWICE: r"\n[^\S\n]*\n\s*\Z",
}


@dataclass(frozen=True)
class Borders:
    """Where windows may end: after which kind of unit, and the flags (V,) of each token."""

    kind: BorderKind
    flags: NDArray[np.uint16]

    @cached_property
    def key(self) -> str:
        """A hash of it all: equal keys give equal borders."""
        return hashlib.sha256(self.kind.encode() + self.flags.tobytes()).hexdigest()[:32]

    def after(self, tokens: NDArray[Any]) -> NDArray[np.int64]:
        """Return the positions of the tokens (N,) that a border follows; of the last one that is not known."""
        flags = self.flags[tokens]
        paragraphs = _paragraph_ends(flags)
        return paragraphs if self.kind == "paragraph" else _merged(paragraphs, _sentence_ends(flags))


def border_table(backend: tokenizers.Tokenizer, kind: BorderKind) -> Borders:
    """Make the flags of all tokens of a tokenizer.

    Each is decoded after another token, so that what the decoder does at the begin of a text does not hide a space.

    Raises:
        DataError: if paragraphs are asked for and the tokenizer drops line breaks.
    """
    ids = backend.get_vocab(with_added_tokens=True).values()
    flags = np.zeros(1 + max(ids), np.uint16)
    anchor = backend.encode("a", add_special_tokens=False).ids[-1:]
    before = len(backend.decode(anchor, skip_special_tokens=False))
    texts = backend.decode_batch([[*anchor, number] for number in range(len(flags))], skip_special_tokens=False)
    for number, text in enumerate(texts):
        flags[number] = _flags_of(text[before:])
    special = [number for number, token in backend.get_added_tokens_decoder().items() if token.special]
    flags[special] = 0
    if kind == "paragraph" and not _has(flags[backend.encode("a\n\na", add_special_tokens=False).ids], _BREAKS).any():
        raise DataError(
            f"this tokenizer of {len(flags)} tokens drops line breaks, so no paragraph ends in its tokens: use "
            f"borders `sentence`, or another tokenizer"
        )
    return Borders(kind, flags)


def cut_at_borders(
    store: Tokens, borders: Borders, sequence_length: int, with_end: bool
) -> Iterator[tuple[tuple[NDArray[np.int64], NDArray[np.int64]], int]]:
    """Yield the starts and lengths of the windows of all texts, and how many of these end where no border fitted.

    A window ends at the last border at most ``sequence_length`` tokens from its begin, or there if there is none.
    """
    begin, num_tokens = 0, len(store.tokens)
    while begin < num_tokens:
        stop = min(begin + max(_TOKENS_PER_PASS, 4 * sequence_length), num_tokens)
        cuts_C, texts_C, is_hard_C = _cuts(store, borders, sequence_length, with_end, (begin, stop))
        path = _path(cuts_C, texts_C, sequence_length, stop if stop < num_tokens else None)
        edges = cuts_C[path]
        begin = int(edges[-1])
        starts, lengths = edges[:-1], np.diff(edges)
        texts = np.searchsorted(store.ends, starts)
        is_lone_end = (store.ends[texts] == starts) & (starts > 0) & (store.ends[texts - 1] != starts - 1)
        kept = ~is_lone_end | with_end
        yield (starts[kept], lengths[kept]), int(np.count_nonzero(is_hard_C[path[1:]]))


def _cuts(
    store: Tokens, borders: Borders, sequence_length: int, with_end: bool, reach: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return where windows may meet (C,) in ``reach``, where they must, and which of the former are hard.

    Hard ones are for want of a border: where two others are too far apart, each full length from the first.
    """
    begin, stop = reach
    first = max(begin - 2 * _MOST_TRAILING, 0)  # what a border at `begin` depends on
    after = borders.after(store.tokens[first:stop]) + first + 1
    ends = store.ends[slice(*np.searchsorted(store.ends, (begin, stop)))]
    texts = ends + 1 if with_end else _merged(ends, ends + 1)
    soft = _merged(np.array([begin]), after[after > begin], texts)
    nums = np.maximum((np.diff(soft, append=stop) - 1) // sequence_length, 0)
    hard = np.repeat(soft, nums) + sequence_length * (ragged.positions(nums) + 1)
    both = np.concatenate((soft, hard))
    order = np.argsort(both, kind="stable")
    return both[order], texts[texts > begin], order >= len(soft)


def _path(cuts_C: NDArray[np.int64], texts: NDArray[np.int64], sequence_length: int, stop: int | None) -> list[int]:
    """Return the cuts from the first on that windows end at, as far as tokens up to ``stop`` (``None``: all) tell."""
    furthest = np.searchsorted(cuts_C, cuts_C + sequence_length, "right") - 1
    must = np.append(np.searchsorted(cuts_C, texts), len(cuts_C) - 1)
    bound = must[np.minimum(np.searchsorted(must, np.arange(len(cuts_C)), "right"), len(must) - 1)]
    next_cuts = np.minimum(furthest, bound).tolist()
    last = len(cuts_C) - 1 if stop is None else int(np.searchsorted(cuts_C, stop - sequence_length))
    path = [0]
    while path[-1] < last:
        path.append(next_cuts[path[-1]])
    return path


def _flags_of(text: str) -> int:
    flags = sum(flag for flag, pattern in _PATTERNS.items() if re.search(pattern, text))
    is_capital = text[-1:].isupper() and not text[-2:-1].isalpha()  # no pattern knows the letters of all scripts
    return flags | _IS_SMALL * text.lstrip()[:1].islower() | _IS_CAPITAL * is_capital


def _paragraph_ends(flags: NDArray[np.uint16]) -> NDArray[np.int64]:
    breaks = np.flatnonzero(_has(flags[:-1], _BREAKS))
    last = _followed(flags, breaks, _BLANK)
    goes_on = np.append(False, last[1:] == last[:-1])[: len(last)]  # from the break before, with nothing between
    return _merged(last[(_has(flags[breaks], _BREAKS_TWICE) | goes_on) & (last < len(flags) - 1)])


def _sentence_ends(flags: NDArray[np.uint16]) -> NDArray[np.int64]:
    signs = np.flatnonzero(_has(flags[:-1], _ENDS))
    last = _followed(flags, signs, _TRAILS, _QUOTES)
    signs, last = signs[last < len(flags) - 1], last[last < len(flags) - 1]
    before, following = flags[np.maximum(signs - 1, 0)], flags[last + 1]
    is_new = (_has(following, _BEGINS_WORD) | _has(flags[last], _ENDS_BLANK)) & ~_has(following, _IS_SMALL)
    is_number = _has(before, _ENDS_DIGIT) & _has(following, _BEGINS_DIGIT)
    return last[_has(flags[signs], _ENDS_FREELY) | is_new & ~is_number & ~_has(before, _IS_CAPITAL)]


def _followed(
    flags: NDArray[np.uint16], places: NDArray[np.int64], trailing: int, trailing_a_word: int = 0
) -> NDArray[np.int64]:
    """Return the last of the tokens with one of these flags that follow each place, or the place."""
    last, most = places, len(flags) - 1
    for _ in range(_MOST_TRAILING):
        following = flags[np.minimum(last + 1, most)]
        goes_on = _has(following, trailing) | _has(following, trailing_a_word) & ~_has(flags[last], _ENDS_BLANK)
        goes_on &= last < most
        if not goes_on.any():
            break
        last = last + goes_on
    return last


def _merged(*parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of some sorted parts, sorted, each once: several times as fast as ``np.unique``."""
    merged = np.sort(np.concatenate(parts), kind="stable")
    return np.delete(merged, np.flatnonzero(merged[1:] == merged[:-1]))


def _has(flags: NDArray[np.uint16], flag: int) -> NDArray[np.bool_]:
    has: NDArray[np.bool_] = (flags & np.uint16(flag)) != 0
    return has
