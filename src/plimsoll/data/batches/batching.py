"""The batches of an epoch, computed from (seed, epoch, position). No list of samples is stored, so any data size works.

`FixedBatches` splits the order into batches of equal size. `BucketBatches` sorts a *pool* of tens of thousands of
samples by length, so that there is little padding. It splits the pool into batches, and shuffles the batches. A
`Cursor` is enough to find a batch: only its pool is planned, and earlier batches are not made. Both classes are also
batch samplers of `torch.utils.data`: they yield lists of sample indices of one epoch (`set_epoch`).

The whole epoch is not sorted, because batches would then come in the order of their lengths.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.data.batches.order import BlockShuffle, Drawn, derived_seed, drawn, shuffled
from plimsoll.errors import CheckpointError, DataError

_SAMPLES_PER_PASS = 1 << 20
_FIXED_POOL_SAMPLES = 1 << 14  # samples whose order is computed at a time
_NAMES_OF_STATE = ("epoch", "position", "num_samples", "order")
_OTHER_NAMES_OF_STATE = ("batch", "plan", "data")  # two for buckets, one for data with known content
_WHAT_IS_A_STATE = "the dict that state_dict() of the loader returned"
_MOST_EPOCHS = 10**9  # more than any training runs, so a larger number means that the state is damaged
_HELD_POOLS = 2  # workers that read ahead of the cursor may already be in the next pool

Lengths: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.integer]]


class Cursor(NamedTuple):
    """The place of a batch: its epoch, the position of its pool's first sample, and its index in the pool."""

    epoch: int = 0
    position: int = 0
    batch: int = 0


class Pool(NamedTuple):
    """Consecutive samples of an order, split into batches: batch k has the samples ``ids[starts[k]:stops[k]]``."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    """A rule that groups samples of similar length into batches. Exactly one of the first three arguments is required.

    Args:
        batch_size: the number of samples of a batch.
        max_tokens: the maximum number of tokens of a batch including padding: the padded length of its longest sample
            times its number of samples.
        rows_for: a table whose entry n is the maximum number of samples of a batch that is padded to n tokens, as
            predicted memory allows. It may also be a mapping from lengths to these numbers. An entry then also holds
            for shorter lengths, down to the next smaller key (`plimsoll.rows_by_length`).
        pool_samples: the number of samples sorted at a time. More samples give less padding, and less random batches.
        pad_multiple: the length of a batch is padded to a multiple of this; by default, ``pad_multiple`` of the data
            set, or 1.
        longest_first: whether the largest batch comes first in epoch 0, so that a memory shortage is found early.
        allow_longer: whether a sample that ``max_tokens`` or ``rows_for`` does not allow becomes a batch of one sample;
            otherwise it is an error.
    """

    batch_size: int | None = None
    max_tokens: int | None = None
    rows_for: ArrayLike | Mapping[int, int] | None = None
    pool_samples: int = 1 << 16
    pad_multiple: int | None = None
    longest_first: bool = True
    allow_longer: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("batch_size", "max_tokens", "rows_for") if getattr(self, name) is not None]
        if len(given) != 1:
            raise DataError(
                f"buckets need one of batch_size, max_tokens and rows_for, but {len(given)} are given"
                f"{''.join(f', {name}' for name in given)}: write for example Buckets(max_tokens=16384)"
            )
        for name in ("batch_size", "max_tokens", "pool_samples", "pad_multiple"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise DataError(f"{name} of buckets is at least 1, not {value}: give a larger one")


class Batches(ABC):
    """The batches of every epoch, each found by its cursor. Iteration yields the batches of one epoch (`set_epoch`)."""

    drop_last = False
    batch_size: int | None  # None: batch sizes vary, which Accelerate supports

    def __init__(self, order: Drawn) -> None:
        self._order = order
        self._epoch = 0
        self._held: dict[tuple[int, int], Pool] = {}

    @property
    def sampler(self) -> Batches:
        """These batches themselves: Lightning calls `set_epoch` on the attribute ``sampler`` of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches the next iteration yields."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        cursor = begin = Cursor(self._epoch)
        while cursor.epoch == begin.epoch:
            yield self.ids(cursor).tolist()
            cursor = self.following(cursor)

    def __len__(self) -> int:
        return self.num_batches(self._epoch)

    def ids(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return the indices of the samples of the batch at a cursor."""
        pool = self._pool_at(cursor)
        return pool.ids[pool.starts[cursor.batch] : pool.stops[cursor.batch]]

    def following(self, cursor: Cursor) -> Cursor:
        """Return the cursor of the batch after ``cursor``, which may be the first batch of the next epoch."""
        pool = self._pool_at(cursor)
        if cursor.batch + 1 < len(pool.starts):
            return cursor._replace(batch=cursor.batch + 1)
        position = cursor.position + len(pool.ids)
        return Cursor(cursor.epoch, position) if position < self._order.num_samples else Cursor(cursor.epoch + 1)

    def num_samples_before(self, cursor: Cursor) -> int:
        """Return the number of samples of the epoch in batches before the cursor."""
        pool = self._pool_at(cursor)
        return cursor.position + int((pool.stops - pool.starts)[: cursor.batch].sum())

    def state(self, cursor: Cursor) -> dict[str, int]:
        """Return the state to checkpoint: the cursor as integers, the number of samples, and a hash of their order."""
        order = zlib.crc32(repr(self._order.identity).encode())
        return self._place(cursor) | {"num_samples": self._order.num_samples, "order": order}

    @abstractmethod
    def _place(self, cursor: Cursor) -> dict[str, int]: ...

    def cursor(self, state: dict[str, int]) -> Cursor:
        """Return the cursor for a state that `state` returned.

        Raises:
            CheckpointError: if the state is invalid, or belongs to other data, another order or other batches.
        """
        _require_state(state)
        cursor = Cursor(state["epoch"], state["position"], state.get("batch", 0))
        if cursor.epoch < 0 or not 0 <= cursor.position < self._order.num_samples:
            raise CheckpointError(
                f"the checkpoint is at sample {cursor.position} of epoch {cursor.epoch}, but the data has "
                f"{self._order.num_samples} samples, so it is not the data of that run: resume with the same text, "
                "sequence_length and held-out share (data.validation)"
            )
        if cursor != Cursor():
            self._require_same_order(state)
        if cursor != Cursor(cursor.epoch) and state.get("plan") != self.state(cursor).get("plan"):
            raise CheckpointError(
                f"the checkpoint is in the middle of epoch {cursor.epoch}, whose batches were made with other buckets, "
                f"another seed or another shuffle (plan {state.get('plan')}, now {self.state(cursor).get('plan')}): "
                f"resume with the buckets, seed and shuffle of that run"
            )
        if not self._is_place(cursor):
            raise CheckpointError(
                f"no batch begins at position {cursor.position:,}, batch {cursor.batch:,} of epoch {cursor.epoch}: "
                f"resume with {_WHAT_IS_A_STATE}"
            )
        return cursor

    @abstractmethod
    def _is_place(self, cursor: Cursor) -> bool:
        """Return whether a batch begins at a cursor."""

    def _require_same_order(self, state: dict[str, int]) -> None:
        own = self.state(Cursor())
        then, now = (one["num_samples"] for one in (state, own))
        if then != now:
            raise CheckpointError(
                f"the checkpoint belongs to data with {then:,} samples, but this data has {now:,}: resume with the "
                "same text, sequence_length and held-out share (data.validation)"
            )
        if state["order"] != own["order"]:
            own_order = " ".join(map(str, self._order.identity))
            raise CheckpointError(
                f"the checkpoint is in the middle of a run (epoch {state['epoch']}) whose samples had another order "
                f"than {own_order}: resume with the seed and the shuffle of that run"
            )

    @abstractmethod
    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""

    @abstractmethod
    def _pool(self, epoch: int, position: int) -> Pool: ...

    def _pool_at(self, cursor: Cursor) -> Pool:
        place = (cursor.epoch, cursor.position)
        if place not in self._held:
            while len(self._held) >= _HELD_POOLS:
                del self._held[next(iter(self._held))]
            self._held[place] = self._pool(*place)
        return self._held[place]


class FixedBatches(Batches):
    """The order split into batches of ``batch_size`` samples; the last may be smaller.

    A run can resume at any sample, also with another batch size.
    """

    def __init__(self, order: Drawn, batch_size: int) -> None:
        super().__init__(order)
        self.batch_size: int = batch_size

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch, including a smaller last one."""
        return -(-self._order.num_samples // self.batch_size)

    def _place(self, cursor: Cursor) -> dict[str, int]:
        """Return a cursor as the epoch and the number of samples before it, which hold for any batch size."""
        return {"epoch": cursor.epoch, "position": cursor.position + cursor.batch * self.batch_size}

    def _is_place(self, cursor: Cursor) -> bool:
        return cursor.batch == 0

    def _pool(self, epoch: int, position: int) -> Pool:
        num_samples = max(_FIXED_POOL_SAMPLES // self.batch_size, 1) * self.batch_size
        ids = self._order.ids(epoch, position, min(position + num_samples, self._order.num_samples))
        starts = np.arange(0, len(ids), self.batch_size)
        return Pool(ids, starts, np.minimum(starts + self.batch_size, len(ids)))


class BucketBatches(Batches):
    """Batches of samples of similar length.

    Args:
        order: the order of the samples.
        lengths: a function from sample indices to their numbers of tokens.
        buckets: the rule that groups the samples.
        pad_multiple: the multiple to which lengths are padded if ``buckets`` has none.
        most_tokens: the upper bound for padded lengths; ``None`` for no bound.

    Raises:
        DataError: if a single sample exceeds the limit of a batch, or ``rows_for`` does not reach the longest sample.
    """

    def __init__(
        self, order: Drawn, lengths: Lengths, buckets: Buckets, pad_multiple: int = 1, most_tokens: int | None = None
    ) -> None:
        super().__init__(order)
        self.batch_size = buckets.batch_size
        self._lengths = lengths
        self._longest_sample, self._longest_tokens = longest_sample(order.num_samples, lengths)
        multiple = buckets.pad_multiple or pad_multiple
        padded = -(-np.arange(self._longest_tokens + 1) // multiple) * multiple
        self._padded = padded if most_tokens is None else np.minimum(padded, most_tokens)
        self._rows = self._most_rows(buckets)
        self._pool_samples = buckets.pool_samples
        if buckets.batch_size:
            self._pool_samples = -(-buckets.pool_samples // buckets.batch_size) * buckets.batch_size
        self._longest_first = buckets.longest_first
        self._exchange: tuple[Cursor, int] | None = None  # the largest batch, and its surplus of samples over batch 0
        self._counted: tuple[int, int] | None = None
        probe = [*order.ids(0, 0, min(order.num_samples, 16)).tolist(), order.num_samples, self._pool_samples]
        self._plan = zlib.crc32(repr([probe, self._longest_first]).encode() + self._rows.tobytes())

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch. If batch sizes vary, this plans the whole epoch."""
        if self.batch_size:
            return -(-self._order.num_samples // self.batch_size)
        if self._counted is None or self._counted[0] != epoch:
            self._counted = (epoch, sum(len(starts) for _, _, _, starts in self._cuts(epoch)))
        return self._counted[1]

    def ids(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return the indices of the samples of the batch at a cursor."""
        return super().ids(self._exchanged(cursor))

    def num_samples_before(self, cursor: Cursor) -> int:
        """Return the number of samples of the epoch in batches before the cursor."""
        number = super().num_samples_before(cursor)
        if self._longest_first and Cursor() < cursor <= (exchange := self._exchange_of_first())[0]:
            number += exchange[1]
        return number

    def _place(self, cursor: Cursor) -> dict[str, int]:
        """Return the cursor, with a hash that identifies these batches."""
        return cursor._asdict() | {"plan": self._plan}

    def _is_place(self, cursor: Cursor) -> bool:
        is_begin = cursor.position % self._pool_samples == 0
        return is_begin and 0 <= cursor.batch < len(self._pool_at(cursor).starts)

    def _exchanged(self, cursor: Cursor) -> Cursor:
        """Return the cursor of the batch to read. In epoch 0, the first batch and the largest batch are swapped."""
        if cursor.epoch or not self._longest_first:
            return cursor
        heaviest, _ = self._exchange_of_first()
        return {Cursor(): heaviest, heaviest: Cursor()}.get(cursor, cursor)

    def _exchange_of_first(self) -> tuple[Cursor, int]:
        if self._exchange is None:
            heaviest = self._heaviest()
            self._exchange = (heaviest, len(super().ids(heaviest)) - len(super().ids(Cursor())))
        return self._exchange

    def _heaviest(self) -> Cursor:
        """Return the cursor of the largest batch. It comes first, so that a memory shortage is found in the first step.

        The batch with the longest sample has the largest attention matrices. If it is full, it also has nearly the most
        elements: one more sample would exceed the limit. If it is not full, because its pool ends, the batch with the
        most elements comes first.
        """
        position = int(self._order.positions(0, np.array([self._longest_sample]))[0])
        begin = position - position % self._pool_samples
        pool = self._pool_at(Cursor(0, begin))
        at = int(np.flatnonzero(pool.ids == self._longest_sample)[0])
        batch = int(np.flatnonzero((pool.starts <= at) & (at < pool.stops))[0])
        if pool.stops[batch] - pool.starts[batch] == self._rows[self._longest_tokens]:
            return Cursor(0, begin, batch)
        return self._largest()

    def _largest(self) -> Cursor:
        """Return the cursor of the batch in epoch 0 with the most elements.

        If several batches have equally many, the batch with the longest sample is chosen.
        """
        best, found = (0, 0), Cursor()
        for begin, _, tokens, starts in self._cuts(0):
            longest = tokens[starts]
            elements = np.diff(starts, append=len(tokens)) * self._padded[longest]
            cut = int(np.lexsort((longest, elements))[-1])
            if (heavy := (int(elements[cut]), int(longest[cut]))) > best:
                best, found = (
                    heavy,
                    Cursor(0, begin, int(np.flatnonzero(self._batch_order(0, begin, len(starts)) == cut)[0])),
                )
        return found

    def _pool(self, epoch: int, position: int) -> Pool:
        ids, tokens, starts = self._cut(epoch, position)
        order = self._batch_order(epoch, position, len(starts))
        return Pool(ids, starts[order], np.append(starts[1:], len(tokens))[order])

    def _batch_order(self, epoch: int, position: int, num_batches: int) -> NDArray[np.int64]:
        return shuffled(num_batches, derived_seed(self._order.seed, 3, epoch, position))

    def _cuts(self, epoch: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.integer], NDArray[np.int64]]]:
        for position in range(0, self._order.num_samples, self._pool_samples):
            yield (position, *self._cut(epoch, position))

    def _cut(self, epoch: int, position: int) -> tuple[NDArray[np.int64], NDArray[np.integer], NDArray[np.int64]]:
        """Return the samples of a pool, longest first, the number of tokens of each, and the start of each batch."""
        ids = self._order.ids(epoch, position, min(position + self._pool_samples, self._order.num_samples))
        tokens = self._lengths(ids)
        # numpy sorts 16-bit numbers by radix sort, in a tenth of the time.
        ranks = np.argsort(
            (self._longest_tokens - tokens).astype(np.min_scalar_type(self._longest_tokens)), kind="stable"
        )
        tokens = tokens[ranks]
        rows, starts = self._rows[tokens], [0]
        while (start := starts[-1] + int(rows[starts[-1]])) < len(ids):
            starts.append(start)
        return ids[ranks], tokens, np.array(starts)

    def _most_rows(self, buckets: Buckets) -> NDArray[np.int64]:
        """Return the maximum number of samples of a batch, indexed by the length of its longest sample."""
        if buckets.batch_size:
            return np.full(len(self._padded), buckets.batch_size)
        if buckets.max_tokens:
            rows, limit = buckets.max_tokens // np.maximum(self._padded, 1), f"max_tokens = {buckets.max_tokens}"
        else:
            table: NDArray[np.int64] = _table_of(buckets.rows_for)
            if len(table) <= self._padded[-1]:
                raise DataError(
                    f"rows_for ends at {len(table) - 1} tokens, but sample {self._longest_sample} is padded to "
                    f"{self._padded[-1]}: give a table that reaches it, or shorten the samples"
                )
            rows, limit = table[self._padded], "rows_for, which allows no sample of that length"
        if not rows[-1] and not buckets.allow_longer:
            raise DataError(
                f"sample {self._longest_sample} is padded to {self._padded[-1]} tokens, more than a batch may have by "
                f"{limit}: raise that, shorten the samples, or set allow_longer=True to give it a batch of its own"
            )
        most: NDArray[np.int64] = np.maximum(rows, 1)
        return most


def _require_state(state: Any) -> None:
    """Raise if ``state`` is not a mapping from known names to integers, as `Batches.state` returns.

    Raises:
        CheckpointError: if ``state`` is anything else.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the state of a loader is a dict of whole numbers, but this is {type(state).__name__} ({state!r:.60}): "
            f"give {_WHAT_IS_A_STATE}"
        )
    missing = [name for name in _NAMES_OF_STATE if name not in state]
    others = [name for name in state if name not in {*_NAMES_OF_STATE, *_OTHER_NAMES_OF_STATE}]
    if missing or others:
        what = f"has no {', '.join(missing)}" if missing else f"has {others[0]!r}, which is not one of its names"
        raise CheckpointError(
            f"the state of a loader {what} (it has {', '.join(map(str, state)) or 'nothing'}): give {_WHAT_IS_A_STATE}"
        )
    for name, value in state.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(
                f"{name} = {value!r:.60} in the state of a loader is not a whole number: give {_WHAT_IS_A_STATE}"
            )
    if state["epoch"] >= _MOST_EPOCHS:
        raise CheckpointError(
            f"epoch = {state['epoch']:,} in the state of a loader is more than any training reaches "
            f"({_MOST_EPOCHS:,}): give {_WHAT_IS_A_STATE}"
        )


def batches_of(
    dataset: Sized,
    batches: int | Buckets,
    seed: int = 0,
    shuffle: bool | BlockShuffle = True,
    lengths: Lengths | NDArray[np.integer] | None = None,
) -> Batches:
    """Return the batches of a data set, which any `torch.utils.data.DataLoader` also accepts as ``batch_sampler``.

    Args:
        dataset: the data set. Only its length and, for buckets, its ``lengths`` and ``pad_multiple`` are used.
        batches: the number of samples of a batch, or the rule that groups samples of similar length into batches.
        seed: a different seed draws a different order.
        shuffle: whether each epoch has a new order; `BlockShuffle` reads large files in large blocks.
        lengths: for buckets, the number of tokens of each sample, or a function from sample indices to these numbers;
            by default, ``lengths`` of the data set.

    Raises:
        DataError: if the data does not fill one batch, or its lengths do not fit the buckets. Also if the data set has
            stream slots, and the batches would not read its windows in order.
    """
    batch_size = batches if isinstance(batches, int) else batches.batch_size or 1
    num_slots = getattr(dataset, "num_slots", None)  # set for streams: windows continue the previous batch
    if num_slots is not None and (shuffle or batches != num_slots):
        raise DataError(
            f"windows of {num_slots} stream slots make batches in their order only, one window of each slot, but these "
            f"are {'shuffled' if shuffle else f'of {batches}'}: give {num_slots} as the batch, and shuffle=False"
        )
    if len(dataset) < batch_size:
        raise DataError(
            f"the data has {len(dataset)} samples, but one step takes batch_size = {batch_size}: give more text, a "
            f"shorter sequence_length, or a smaller batch with --set batch_size={max(len(dataset), 1)}"
        )
    order = drawn(len(dataset), seed, shuffle)
    if isinstance(batches, int):
        return FixedBatches(order, batches)
    if lengths is None:
        if not hasattr(dataset, "lengths"):
            raise DataError(
                f"buckets need the lengths of the samples, which {type(dataset).__name__} does not have: pass lengths, "
                f"an array of the tokens of each sample"
            )
        lengths = dataset.lengths
    known: Any = lengths if callable(lengths) else np.asarray(lengths).__getitem__
    most_tokens = getattr(dataset, "sequence_length", None)  # the upper bound for padding
    return BucketBatches(order, known, batches, getattr(dataset, "pad_multiple", 1), most_tokens)


def _table_of(rows_for: ArrayLike | Mapping[int, int] | None) -> NDArray[np.int64]:
    if not isinstance(rows_for, Mapping):
        return np.asarray(rows_for, np.int64)
    lengths = sorted(rows_for)
    rows = np.array([rows_for[length] for length in lengths], np.int64)
    return rows[np.searchsorted(lengths, np.arange(lengths[-1] + 1))]


def longest_sample(num_samples: int, lengths: Lengths) -> tuple[int, int]:
    """Return the index of the longest sample (the first of several), and its number of tokens."""
    sample, tokens = 0, -1
    for begin in range(0, num_samples, _SAMPLES_PER_PASS):
        some = lengths(np.arange(begin, min(begin + _SAMPLES_PER_PASS, num_samples)))
        if some.max() > tokens:
            sample, tokens = begin + int(some.argmax()), int(some.max())
    return sample, tokens
