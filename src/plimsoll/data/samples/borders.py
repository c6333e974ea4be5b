"""Windows that end at a sentence or paragraph, whose borders are found in the text before it is tokenized.

Borders are found before tokenization, so it does not matter whether the tokenizer keeps capitals, spaces and line
breaks. The token with the first character of a sentence or paragraph is marked, in a file next to the tokens
(`plimsoll.data.tokens.store`). Windows are cut at these marks. A wrong border moves the end of a window, but loses no
token.

Not handled: abbreviations before a capital letter ("Mr. Smith" is cut), texts without capitals, headings and lists
without a blank line. Also not handled: languages without such punctuation, and sentences that begin inside a token.

Shapes: N tokens, C places where a window may begin or end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged

BorderKind = Literal["sentence", "paragraph"]
MARKS: dict[BorderKind, int] = {"sentence": 1, "paragraph": 2}
"""The bits that mark the first token of a sentence or paragraph. A paragraph also begins a sentence: both are set."""

_TOKENS_PER_PASS = 1 << 20
_CONTEXT_CHARACTERS = 256  # before and after a piece; borders in longer runs of punctuation and white space are missed

# A sentence ends after `. ! ? …` and closing quotes and brackets if white space follows, or after full-width signs.
_CLOSERS = r")\]}»”’›」』）】"  # these always close; straight quotes close only if they directly follow the punctuation

# A match can begin only at the start of a run, and the quantifiers are possessive, so matching takes linear time.
_SENTENCE = re.compile(
    rf"""(?<![.!?…])[.!?…]++[\"'{_CLOSERS}]*+(?:\s++[{_CLOSERS}][\"'{_CLOSERS}]*+)*\s++(?=\S)"""
    rf"""|(?<![。！？])[。！？]++[\"'{_CLOSERS}]*+\s*+(?=\S)"""
)
_PARAGRAPH = re.compile(r"(?<!\s)[^\S\n]*+\n[^\S\n]*+\n\s*+(?=\S)")
_INITIAL = re.compile(r"(?<![^\W_])[^\W\d_]\Z")

Ints = NDArray[np.int64]
Marks = NDArray[np.uint8]


class Marked(Protocol):
    """Concatenated tokens of texts, with a mark on each token that begins a sentence or a paragraph."""

    @property
    def tokens(self) -> NDArray[np.integer]:
        """The tokens of all texts, with an end token after each text."""
        ...

    @property
    def ends(self) -> Ints:
        """The index of the end token of each text."""
        ...

    @property
    def marks(self) -> Marks:
        """The mark of each token: bits of `MARKS`, or 0."""
        ...


class Begin(NamedTuple):
    """The beginning of a sentence or paragraph in a text.

    ``place`` is the index of its first character. ``end_before`` is the index at which the preceding sentence ends
    (exclusive). ``mark`` holds the bits of `MARKS`.
    """

    place: int
    end_before: int
    mark: int


def begins_in(text: str, context: tuple[str, str] = ("", "")) -> list[Begin]:
    """Return the sentences and paragraphs that begin in a text or in a piece of a text, in order.

    The beginning of the text itself is not included.

    Args:
        text: the text, or a piece of it.
        context: the characters before and after ``text`` if it is a piece of a longer text.
    """
    offset, whole = len(context[0]), "".join((context[0], text, context[1])) if any(context) else text
    found = {
        match.end(): Begin(match.end() - offset, match.start() - offset, MARKS["sentence"] | MARKS["paragraph"])
        for match in _PARAGRAPH.finditer(whole)
    }
    for match in _SENTENCE.finditer(whole):
        if match.end() not in found and _ends_a_sentence(whole, match):
            visible = len(match[0].rstrip())
            found[match.end()] = Begin(match.end() - offset, match.start() + visible - offset, MARKS["sentence"])
    return [found[place] for place in sorted(found) if 0 < place <= len(whole) and 0 <= place - offset < len(text)]


def _ends_a_sentence(text: str, match: re.Match[str]) -> bool:
    """Return whether a match ends a sentence, which it does not in "e.g. this", "3. 14" and "U.S. Army"."""
    sign, before, following = match[0], text[max(match.start() - 2, 0) : match.start()], text[match.end()]
    if sign[0] in "。！？":
        return True
    if following.islower():
        return False
    is_one_stop = sign[0] == "." and sign[1:2] != "."
    initial = _INITIAL.search(before)
    return not is_one_stop or not (
        (initial is not None and initial[0].isupper()) or (before[-1:].isdigit() and following.isdigit())
    )


class Piece(NamedTuple):
    """A text or a part of a text, whether it is the first or last part, and the sentences that begin in it."""

    text: str
    is_first: bool
    is_last: bool
    begins: Sequence[Begin] = ()


def marked_pieces(pieces: Iterable[tuple[str, bool]], with_borders: bool) -> Iterator[Piece]:
    """Yield the pieces of texts with the sentences and paragraphs that begin in them, if ``with_borders``.

    Borders are found with the surrounding characters of the same text.

    Args:
        pieces: pairs of a piece and a bool, which is true for the last piece of a text, as from `Corpus.pieces`.
        with_borders: whether to find borders.
    """
    before, is_first = "", True
    waiting: Piece | None = None
    for text, is_last in pieces:
        if waiting is not None:
            behind = "" if waiting.is_last else text[:_CONTEXT_CHARACTERS]
            yield _with_begins(waiting, before, behind, with_borders)
            before = "" if waiting.is_last else (before + waiting.text)[-_CONTEXT_CHARACTERS:]
        waiting = Piece(text, is_first, is_last)
        is_first = is_last
    if waiting is not None:
        yield _with_begins(waiting, before, "", with_borders)


def _with_begins(piece: Piece, before: str, behind: str, with_borders: bool) -> Piece:
    return piece._replace(begins=begins_in(piece.text, (before, behind))) if with_borders else piece


def marks_of(offsets: Sequence[tuple[int, int]], begins: Sequence[Begin], num_before: int = 0) -> Marks:
    """Return the marks of the tokens of a piece, (N,) uint8.

    Args:
        offsets: the index of the first character of each token, and of the first character after the token.
        begins: the sentences and paragraphs that begin in the piece.
        num_before: the number of characters before the piece that ``offsets`` include.
    """
    marks = np.zeros(len(offsets), np.uint8)
    if not begins or not offsets:
        return marks
    starts, stops = np.array(offsets, np.int64).T - num_before
    places, ends_before, kinds = np.array(begins, np.int64).T
    holding = np.searchsorted(stops, places, "right")
    is_there = holding < len(stops)
    holding, ends_before, kinds = holding[is_there], ends_before[is_there], kinds[is_there]
    begins_there = starts[holding] >= ends_before
    np.bitwise_or.at(marks, holding[begins_there], kinds[begins_there].astype(np.uint8))
    return marks


def cut_at_borders(
    store: Marked, kind: BorderKind, room: int, with_end: bool, keeps_empty: bool = False
) -> Iterator[tuple[tuple[Ints, Ints], int]]:
    """Yield the windows of all texts, some at a time: starts, lengths, and how many do not end at a border.

    A window has at most ``room`` tokens and ends at the last border among them. Without one, it has ``room``.

    Args:
        store: the tokens of all texts, with marks.
        kind: the kind of border at which windows end.
        room: the maximum number of tokens of a window.
        with_end: whether the windows of a text include its end token.
        keeps_empty: whether an empty text gives a window of length 0. Otherwise its window is the end token.
    """
    begin, num_tokens = 0, len(store.tokens)
    while begin < num_tokens:
        stop = min(begin + max(_TOKENS_PER_PASS, 4 * room), num_tokens)
        cuts_C, texts_C, is_hard_C = _cuts(store, kind, room, with_end, (begin, stop))
        path = _path(cuts_C, texts_C, room, stop if stop < num_tokens else None)
        edges = cuts_C[path]
        begin = int(edges[-1])
        starts, lengths = edges[:-1], np.diff(edges)
        texts = np.searchsorted(store.ends, starts)
        is_end = (store.ends[texts] == starts) & (not with_end)
        is_empty = is_end & ((starts == 0) | (store.ends[texts - 1] == starts - 1))
        kept = ~is_end | is_empty
        lengths = np.where(is_empty & keeps_empty, 0, lengths)
        yield (starts[kept], lengths[kept]), int(np.count_nonzero(is_hard_C[path[1:]]))


def _cuts(
    store: Marked, kind: BorderKind, room: int, with_end: bool, reach: tuple[int, int]
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the possible edges of windows (C,), the edges where texts begin or end, and whether each edge is hard.

    All edges lie in ``reach``, the first token and the last token (exclusive) to inspect. A hard edge is not a border.
    Hard edges are inserted every ``room`` tokens if two borders are farther apart than that.
    """
    begin, stop = reach
    marked = begin + 1 + np.flatnonzero(store.marks[begin + 1 : stop] & np.uint8(MARKS[kind]))
    ends = store.ends[slice(*np.searchsorted(store.ends, (begin, stop)))]
    texts = ends + 1 if with_end else _merged(ends, ends + 1)
    soft = _merged(np.array([begin]), marked, texts)
    nums = np.maximum((np.diff(soft, append=stop) - 1) // room, 0)
    hard = np.repeat(soft, nums) + room * (ragged.positions(nums) + 1)
    both = np.concatenate((soft, hard))
    order = np.argsort(both, kind="stable")
    return both[order], texts[texts > begin], order >= len(soft)


def _path(cuts_C: Ints, texts: Ints, room: int, stop: int | None) -> list[int]:
    """Return the indices in ``cuts_C`` of the edges between windows, chosen greedily from the first edge.

    ``stop`` is the end of the inspected tokens, or ``None`` if the inspected tokens reach the end of the store.
    """
    furthest = np.searchsorted(cuts_C, cuts_C + room, "right") - 1
    must = np.append(np.searchsorted(cuts_C, texts), len(cuts_C) - 1)
    bound = must[np.minimum(np.searchsorted(must, np.arange(len(cuts_C)), "right"), len(must) - 1)]
    next_cuts = np.minimum(furthest, bound).tolist()
    last = len(cuts_C) - 1 if stop is None else int(np.searchsorted(cuts_C, stop - room))
    path = [0]
    while path[-1] < last:
        path.append(next_cuts[path[-1]])
    return path


def _merged(*parts: Ints) -> Ints:
    """Return the distinct numbers of sorted arrays, sorted. This is several times as fast as ``np.unique``."""
    merged = np.sort(np.concatenate(parts), kind="stable")
    return np.delete(merged, np.flatnonzero(merged[1:] == merged[:-1]))
