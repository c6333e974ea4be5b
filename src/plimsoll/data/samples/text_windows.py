"""Texts cut into spans of at most ``sequence_length`` tokens: where each sample begins, and its length.

Special tokens around a text (`plimsoll.data.tokens.template`) are added to each span when it is read, and counted in
its length. They are not in the store. So a window of a long text equals the output of transformers with
``return_overflowing_tokens``. If no text is too long, or all long texts are truncated, spans follow from the store and
take no memory. Otherwise spans are a memory-mapped table (12 bytes per span), written once next to the tokens.

Not handled: spans that cross the end of a text (`plimsoll.data.samples.windows.WindowDataset`), and overlap of windows
that end at borders. Shapes: B requested spans, N spans of one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.data.samples.borders import BorderKind, cut_at_borders
from plimsoll.data.tokens.store import TokenStore
from plimsoll.data.tokens.template import NO_TEMPLATE, Template
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_runs, require_whole
from plimsoll.files.store import Facts, Progress, Store, kept, kept_facts, read_facts, silent

LongTexts = Literal["window", "truncate", "stop"]

_RECIPE = 1  # increase it if the same settings give other spans
_ITEMS_PER_PASS = 1 << 18
_STARTS_FILE, _LENGTHS_FILE = "starts.bin", "lengths.bin"

Table = tuple[NDArray[np.int64], NDArray[np.int64]]  # starts and lengths (N,)
_Texts = Callable[[NDArray[np.int64]], Table]  # returns the table of the texts with these indices


class Spans:
    """The position of each sample in ``store.tokens``; picklable.

    The span of an empty text consists of its special tokens, or of the end token if there are no special tokens.

    Attributes:
        num_long_texts: the number of texts longer than a sample.
        num_truncated: the number of texts that were truncated.
        num_dropped_tokens: the number of tokens lost by truncation.
        num_cut_inside: the number of windows that end inside a sentence or paragraph, because they contain no border.
    """

    def __init__(self, store: TokenStore, folder: Path, facts: Facts) -> None:
        self.store, self.folder = store, folder
        self._tokens: NDArray[np.unsignedinteger[Any]] = np.asarray(store.tokens)  # verified in `rows`
        self.sequence_length: int = facts["sequence_length"]
        self.template = Template(*map(tuple, facts.get("template", ())))
        self._room, self._keeps_end = self.template.room(self.sequence_length), facts.get("keeps_end", False)
        self.with_end: bool = facts["with_end"]
        self.num_tokens: int = facts["num_tokens"]
        self.num_long_texts: int = facts["num_long_texts"]
        self.num_truncated: int = facts["num_truncated"]
        self.num_dropped_tokens: int = facts["num_dropped_tokens"]
        self.num_cut_inside: int = facts["num_cut_inside"]
        self._table: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None
        if facts["has_table"]:
            files = (_STARTS_FILE, np.int64), (_LENGTHS_FILE, np.int32)
            require_whole(*(folder / name for name, _ in files))
            # Plain arrays: indexing a memmap creates memmap objects, which takes longer than the indexing itself.
            starts, lengths = (np.asarray(np.memmap(folder / name, dtype, "r")) for name, dtype in files)
            self._table = starts, lengths

    def __reduce__(self) -> tuple[Any, ...]:
        return open_spans, (self.store, self.folder)

    def __len__(self) -> int:
        return len(self.store.ends if self._table is None else self._table[0])

    @property
    def are_texts(self) -> bool:
        """A flag that is true if span ``i`` is text ``i``, whole or truncated."""
        return self._table is None

    def rows(self, ids: NDArray[np.int64]) -> Table:
        """Return the tokens of spans with their special tokens, end to end (N,), and the length of each (B,)."""
        starts_B, lengths_B = self.places(ids)
        require_runs(self.store.tokens, starts_B, starts_B + lengths_B)
        return self.template.around(self._tokens[ragged.places(starts_B, lengths_B)].astype(np.int64), lengths_B)

    def places(self, ids: NDArray[np.int64]) -> Table:
        """Return the index of the first text token of each span, and its number of text tokens, (B,) each."""
        if self._table is None:
            starts_B, lengths_B = _texts(self.store, ids, self.with_end, self.template)
            kept_B = np.minimum(lengths_B, self._room)
            return (starts_B + (lengths_B - kept_B) if self._keeps_end else starts_B), kept_B
        return self._table[0][ids], self._table[1][ids].astype(np.int64)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each span, including special tokens, (B,)."""
        return self.places(ids)[1] + self.template.num_tokens

    def parents(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the text of each span, (B,)."""
        return ids if self._table is None else np.searchsorted(self.store.ends, self._table[0][ids])

    def num_of_parents(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of spans of each of the texts ``parents``, (B,)."""
        if self._table is None:
            return np.ones(len(parents), np.int64)
        starts_B, lengths_B = _texts(self.store, parents, self.with_end, self.template)
        first_B, stop_B = (np.searchsorted(self._table[0], edges_B) for edges_B in (starts_B, starts_B + lengths_B))
        return stop_B - first_B

    def num_repeated(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of text tokens at the start of each span that the previous span also has, (B,)."""
        if self._table is None:
            return np.zeros(len(ids), np.int64)
        before_B = np.maximum(ids - 1, 0)
        ends_B = self._table[0][before_B] + self._table[1][before_B]
        return np.where(ids > 0, np.maximum(ends_B - self._table[0][ids], 0), 0)

    def num_known(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens at the start of each span that an earlier span predicts, (B,).

        If there are such tokens, the special tokens before them are counted, too.
        """
        num_repeated_B = self.num_repeated(ids)
        return np.where(num_repeated_B > 0, num_repeated_B + len(self.template.prefix), 0)

    def own_ranges(self, ids: NDArray[np.int64]) -> Table:
        """Return the range of tokens that each span owns: its first and last token (exclusive), (B,) each.

        A token that two spans share belongs to the span in which it is farther from an edge: the earlier span owns the
        first half and the middle token. Tokens are counted from the first text token of the span.
        """
        following = np.minimum(ids + 1, len(self) - 1)
        shared_after_B = np.where(ids + 1 < len(self), self.num_repeated(following), 0)
        return (self.num_repeated(ids) + 1) // 2, self.places(ids)[1] - shared_after_B // 2


@kept
def cut_texts(
    store: TokenStore,
    sequence_length: int,
    *,
    long_texts: LongTexts = "window",
    stride: int | None = None,
    borders: BorderKind | None = None,
    with_end: bool = False,
    template: Template = NO_TEMPLATE,
    keeps_end: bool = False,
    progress: Progress = silent,
) -> Store[Spans]:
    """Return the spans of texts, from the cache folder that holds ``store``, or cut now.

    Args:
        store: the tokens of all texts.
        sequence_length: the maximum number of tokens of a span, including special tokens.
        long_texts: the treatment of longer texts. ``"window"`` cuts them into spans, ``"truncate"`` keeps one span of
            each, and ``"stop"`` raises.
        stride: the number of tokens from the beginning of a window to the next beginning, from 1 to the maximum number
            of text tokens of a span (the default).
        borders: the kind of border at which windows end. A window ends at the last border that fits, or where the span
            is full if no border fits. The store must have been made with ``borders``. ``None``: windows end anywhere.
        with_end: whether the spans of a text include its end token, so that language models learn where a text ends.
        template: the special tokens around each span.
        keeps_end: whether truncation drops the beginning of a text instead of its end.
        progress: called with the stage ``"spans"``, and the done and total number of tokens.

    Raises:
        DataError: if a text is too long and ``long_texts`` is ``"stop"``, or ``stride`` is out of range or unused.
        OutputError: if the cache cannot be written.
    """
    room = template.room(sequence_length)
    num_steps = checked_stride(stride, room)
    if stride is not None and (borders is not None or long_texts != "window"):
        what = "long_texts = window" if long_texts != "window" else "windows that do not end at borders"
        raise DataError(f"stride = {stride} works only with {what}: leave stride out, or use {what}")
    settings: tuple[object, ...] = (
        _RECIPE,
        store.folder.name,
        sequence_length,
        long_texts,
        num_steps,
        borders,
        with_end,
    )
    if template.num_tokens or keeps_end:  # otherwise, cache entries from before these settings stay valid
        settings = (*settings, template, keeps_end)
    folder = store.folder.parent / f"spans-{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"
    lengths_of = partial(_texts, store, with_end=with_end, template=template)
    windows = _strided(len(store.ends), lengths_of, room, num_steps)
    if borders is not None:
        windows = cut_at_borders(store, borders, room, with_end, keeps_empty=template.num_tokens > 0)

    def write(place: Path) -> Facts:
        facts = _surveyed(len(store.ends), lengths_of, sequence_length, template, long_texts)
        facts |= {"with_end": with_end, "template": template, "keeps_end": keeps_end}
        if facts["num_long_texts"] > facts["num_truncated"]:
            facts |= _written(place, windows, template, lambda done: progress("spans", done, len(store.tokens)))
        return facts

    return Store(folder, write, partial(Spans, store))


def open_spans(store: TokenStore, folder: Path) -> Spans:
    """Open the memory-mapped spans that `cut_texts` or `select_spans` stored in ``folder``.

    Raises:
        DataError: if the spans are missing or damaged.
    """
    return Spans(store, folder, kept_facts(folder, "spans"))


@kept
def select_spans(spans: Spans, name: str, is_chosen: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Store[Spans]:
    """Return the spans of some texts, from the cache or written now.

    Args:
        spans: the spans of all texts.
        name: the cache key of the selection; it must identify the selection.
        is_chosen: a function that maps an array of text indices to whether each text is selected.

    Raises:
        OutputError: if the cache cannot be written.
    """

    def write(folder: Path) -> Facts:
        facts = read_facts(spans.folder)
        assert facts is not None, spans.folder
        return facts | _written(folder, _chosen_tables(spans, is_chosen), spans.template, lambda _done: None)

    folder = spans.folder.with_name(f"{spans.folder.name}-{name}")
    return Store(folder, write, partial(Spans, spans.store))


def checked_stride(stride: int | None, sequence_length: int) -> int:
    """Check and return the stride, which is ``sequence_length`` by default.

    Raises:
        DataError: if the stride is out of range.
    """
    if stride is not None and not 1 <= stride <= sequence_length:
        raise DataError(
            f"stride = {stride} would lose tokens or never advance: give from 1 to sequence_length = {sequence_length}"
        )
    return sequence_length if stride is None else stride


def _texts(store: TokenStore, ids: NDArray[np.int64], with_end: bool, template: Template) -> Table:
    """Return the index of the first token of each text, and its number of tokens without special tokens."""
    starts_B = np.where(ids > 0, store.ends[ids - 1] + 1, 0)
    return starts_B, np.maximum(store.ends[ids] - starts_B + with_end, 0 if template.num_tokens else 1)


def _passes(num_items: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, num_items, _ITEMS_PER_PASS):
        yield np.arange(begin, min(begin + _ITEMS_PER_PASS, num_items))


def _surveyed(num_texts: int, texts: _Texts, sequence_length: int, template: Template, long_texts: LongTexts) -> Facts:
    """Read the lengths of all texts, and return the metadata of spans for which no table is written."""
    longest = num_long = num_beyond = num_tokens = 0
    for ids in _passes(num_texts):
        lengths_N = texts(ids)[1] + template.num_tokens
        longest = max(longest, int(lengths_N.max()))
        num_long += int(np.count_nonzero(lengths_N > sequence_length))
        num_beyond += int(np.maximum(lengths_N - sequence_length, 0).sum())
        num_tokens += int(lengths_N.sum())
    if num_long and long_texts == "stop":
        raise DataError(
            f"{num_long} of {num_texts} texts are longer than sequence_length = {sequence_length}, the longest "
            f"{longest} tokens: set sequence_length={longest}, or use `window` or `truncate` for long_texts"
        )
    is_cut = num_long > 0 and long_texts == "truncate"
    return {
        "sequence_length": sequence_length,
        "has_table": False,
        "num_tokens": num_tokens - num_beyond if is_cut else num_tokens,
        "num_long_texts": num_long,
        "num_truncated": num_long if is_cut else 0,
        "num_dropped_tokens": num_beyond if is_cut else 0,
        "num_cut_inside": 0,
    }


def _written(
    folder: Path, tables: Iterable[tuple[Table, int]], template: Template, report: Callable[[int], None]
) -> Facts:
    """Write a table of spans in parts. With each part comes the number of its windows that end at no border."""
    num_tokens = num_cut_inside = 0
    with (folder / _STARTS_FILE).open("wb") as starts_file, (folder / _LENGTHS_FILE).open("wb") as lengths_file:
        for (starts_N, lengths_N), num_inside in tables:
            starts_file.write(starts_N.astype(np.int64).data)
            lengths_file.write(lengths_N.astype(np.int32).data)
            num_tokens += int(lengths_N.sum()) + len(lengths_N) * template.num_tokens
            num_cut_inside += num_inside
            if len(starts_N):
                report(int(starts_N[-1] + lengths_N[-1]))
    return {"has_table": True, "num_tokens": num_tokens, "num_cut_inside": num_cut_inside}


def _strided(num_texts: int, texts: _Texts, room: int, stride: int) -> Iterator[tuple[Table, int]]:
    """Yield the windows of all texts, a limited number at a time, even if one text is very long."""
    for ids in _passes(num_texts):
        starts, lengths = texts(ids)
        for texts_N, steps_N, lengths_N in windows_of(lengths, room, stride):
            yield (starts[texts_N] + steps_N, lengths_N), 0


def _chosen_tables(
    spans: Spans, is_chosen: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
) -> Iterator[tuple[Table, int]]:
    for ids in _passes(len(spans)):
        chosen = ids[is_chosen(spans.parents(ids))]
        if len(chosen):
            yield spans.places(chosen), 0


def windows_of(
    lengths: NDArray[np.int64], sequence_length: int, stride: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the windows that texts of these lengths are cut into, a limited number at a time.

    Yields:
        for each window, the index of its text, its first token in the text, and its number of tokens, (N,) each.
    """
    nums = 1 + -(-np.maximum(lengths - sequence_length, 0) // stride)
    stops = np.cumsum(nums)
    for windows_N in _passes(int(stops[-1])):
        texts_N = np.searchsorted(stops, windows_N, "right")
        steps_N = (windows_N - stops[texts_N] + nums[texts_N]) * stride
        yield texts_N, steps_N, np.minimum(lengths[texts_N] - steps_N, sequence_length)


def num_windows(num_tokens: int, sequence_length: int, stride: int | None) -> int:
    """Return the number of windows of a token stream in `plimsoll.data.samples.windows.WindowDataset`."""
    step = checked_stride(stride, sequence_length)
    return 1 + (num_tokens - sequence_length) // step if num_tokens >= sequence_length else 0


def refuse_no_window(num_tokens: int, sequence_length: int, text: str = "the text") -> None:
    """Raise if a token stream does not fill one window. ``text`` names the stream in the message.

    Raises:
        DataError: if there are fewer than ``sequence_length`` tokens.
    """
    if num_tokens < sequence_length:
        raise DataError(
            f"{text} has {num_tokens} tokens, but one sample is sequence_length = {sequence_length}: give more text, "
            f"or make samples shorter with --set sequence_length={max(num_tokens // 2, 2)}"
        )
