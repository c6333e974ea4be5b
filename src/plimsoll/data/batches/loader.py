"""Batches with a cursor that moves only when told to, so a step that was undone gets the same samples again.

A batch is a pure function of (seed, epoch, place): `Loader.peek` may be called any number of times, in any process, and
a loader resumed at a cursor goes on exactly as one that was never stopped, whatever its workers, ranks and prefetch are
(`plimsoll.data.batches.batching` says what the batches are, `plimsoll.data.batches.workers` who reads them). None
spills into the next epoch and no sample is dropped. Ranks see the same batches: rank r of R takes every R-th sample of
each, from the r-th on; where a batch has fewer samples than there are ranks, the fields of some are empty.

It keeps the batch at the cursor, and with a CUDA device the next one, which is copied while this one is computed with.
It does NOT wait for other ranks, and knows no sample but by its number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.batching import Batches, Buckets, Cursor, Lengths, batches_of
from plimsoll.data.batches.order import BlockShuffle
from plimsoll.data.batches.transfer import Moving, Transfer
from plimsoll.data.batches.workers import Feed, Task
from plimsoll.data.samples.fingerprint import mark_of
from plimsoll.data.samples.windows import Dataset
from plimsoll.errors import CheckpointError, DataError, PlimsollWarning


def warn(text: str) -> None:
    """Warn of something that was survived."""
    warnings.warn(text, PlimsollWarning, stacklevel=2)


@dataclass(frozen=True)
class Batch:
    """Some samples: their tensors, their numbers in the dataset, and how many of the epoch came before them."""

    fields: dict[str, torch.Tensor]
    sample_ids: NDArray[np.int64]
    epoch: int
    first_sample: int


class Loader:
    """Endless batches of a dataset, epoch after epoch; iterating gives the fields of those left in the epoch.

    Args:
        dataset: samples by number, in batches; or any map-style data set of `torch.utils.data`.
        batches: the samples of a batch, or how batches are made of samples of like length.
        seed: another seed draws another order.
        shuffle: whether each epoch comes in a new order; `BlockShuffle` to read large files in large blocks.
        lengths: for buckets, the tokens of every sample if the dataset has no ``lengths``.
        collate: for map-style data sets, makes a batch of a list of samples; by default the data set's or torch's.
        workers: processes that read ahead; ``"auto"`` by cores and ``host_budget_bytes``, none for a memory map.
        prefetch: how many batches each worker reads ahead.
        device: where the fields are to be.
        rank: which of ``world_size`` parts of each batch this is, from 0.
        world_size: how many processes share each batch.
        host_budget_bytes: what ``"auto"`` workers may take in all.
        on_event: told in a sentence what was survived; a warning by default.
        oom_kills: how many processes the kernel has killed for memory so far, to tell such a kill from others.

    Raises:
        DataError: if the dataset does not fill one batch, or its lengths do not go with the buckets.
    """

    def __init__(
        self,
        dataset: Any,
        batches: int | Buckets,
        seed: int = 0,
        shuffle: bool | BlockShuffle = True,
        *,
        lengths: Lengths | NDArray[np.integer] | None = None,
        collate: Callable[[list[Any]], dict[str, Any]] | None = None,
        workers: int | Literal["auto"] = 0,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        host_budget_bytes: int | None = None,
        on_event: Callable[[str], None] = warn,
        oom_kills: Callable[[], int | None] = lambda: None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is none of {world_size}: give a rank from 0 to {world_size - 1}")
        if workers != "auto" and workers < 0:
            raise DataError(f"there cannot be {workers} workers: give 0 for none, a number, or 'auto'")
        self._dataset, self._workers = dataset, workers
        self._batches = batches_of(dataset, batches, seed, shuffle, lengths)
        self._share = _Share(self._batches, rank, world_size)
        self._cursor = Cursor()
        self._transfer = Transfer(device)
        self._moving: dict[Cursor, Moving] = {}
        self._feed = Feed(
            partial(_read, dataset if hasattr(dataset, "batch") else _MapStyle(dataset, collate)),
            self._share,
            workers,
            prefetch,
            reads_fast=getattr(dataset, "reads_fast", False),
            budget_bytes=host_budget_bytes,
            on_event=on_event,
            oom_kills=oom_kills,
        )

    def __len__(self) -> int:
        """Return how many batches the epoch has in which the cursor is."""
        return self._batches.num_batches(self._cursor.epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch:
            fields = self.peek().fields
            self.advance()
            yield fields

    def peek(self) -> Batch:
        """Return the next batch and leave the cursor where it is."""
        cursor = self._cursor
        moving = self._moved(cursor)
        if self._transfer.is_overlapped:
            self._moved(self._batches.following(cursor))
        first_sample = self._batches.num_samples_before(cursor)
        return Batch(self._transfer.finish(moving), self._share.task(cursor)[1], cursor.epoch, first_sample)

    def advance(self) -> None:
        """Move the cursor past the batch that `peek` returns."""
        self._moving.pop(self._cursor, None)
        self._cursor = self._batches.following(self._cursor)

    def state_dict(self) -> dict[str, int]:
        """Return a few integers: the epoch, how many of its samples are done, what tells data and order from others.

        Of data whose content is not known, see `plimsoll.data.samples.fingerprint`, its length is all that is told.
        """
        return self._batches.state(self._cursor) | ({} if self._mark is None else {"data": self._mark})

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move the cursor to where `state_dict` was called.

        Raises:
            CheckpointError: if it is none, or was with another seed, order, data or length, or in other buckets; the
                cursor stays where it is.
        """
        cursor = self._batches.cursor(state)
        if cursor != Cursor() and None not in {self._mark, state.get("data")} and self._mark != state["data"]:
            raise CheckpointError(
                f"the checkpoint is of other data with as many samples ({state['num_samples']:,}), as some of them "
                "show: resume with the data of that run"
            )
        self._cursor = cursor
        self._moving.clear()

    @cached_property
    def _mark(self) -> int | None:
        return mark_of(self._dataset, self._workers)

    def close(self) -> None:
        """End the worker processes; the next batch begins them again."""
        self._feed.close()

    def _moved(self, cursor: Cursor) -> Moving:
        if cursor not in self._moving:
            self._moving[cursor] = self._transfer.begin(self._feed.fields(cursor))
        return self._moving[cursor]


class _Share:
    """One rank's part of the batches."""

    def __init__(self, batches: Batches, rank: int, world_size: int) -> None:
        self._batches, self._rank, self._world_size = batches, rank, world_size

    def task(self, cursor: Cursor) -> Task:
        return cursor.epoch, self._batches.ids(cursor)[self._rank :: self._world_size].copy()

    def following(self, cursor: Cursor) -> Cursor:
        return self._batches.following(cursor)


def _read(dataset: Any, task: Task) -> dict[str, torch.Tensor]:
    epoch, ids = task
    return dataset.batch(ids, epoch) if len(ids) else {}


class _MapStyle:
    """A map-style data set of `torch.utils.data`, by batches."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], dict[str, Any]] | None) -> None:
        self._dataset = dataset
        self._collate: Callable[[list[Any]], dict[str, Any]] = (
            collate or getattr(dataset, "collate", None) or torch.utils.data.default_collate
        )

    def batch(self, ids: NDArray[np.int64], epoch: int) -> dict[str, Any]:
        numbers = ids.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(numbers))
        return self._collate([self._dataset[number] for number in numbers])


def iterate_once(dataset: Dataset, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """Yield every sample once, in the order of the dataset; the last batch may be smaller.

    Of ``world_size`` ranks each gets every so many-th sample of a batch, and no fields where it has none.
    """
    for start in range(0, len(dataset), batch_size):
        ids = np.arange(start, min(start + batch_size, len(dataset)))[rank::world_size]
        yield Batch(dataset.batch(ids) if len(ids) else {}, ids, 0, start)
