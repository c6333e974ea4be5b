"""Batches with a cursor that moves only on request, so that an undone step gets the same samples again.

A batch is a pure function of (seed, epoch, position). So `Loader.peek` may be called any number of times, in any
process. A resumed loader continues exactly like a loader that was never stopped, with any number of workers, ranks and
prefetched batches. No batch spans two epochs, and no sample is dropped. `plimsoll.data.batches.batching` defines the
batches, and `plimsoll.data.batches.workers` reads them.

All ranks see the same batches: rank r of R takes every R-th sample of each batch, starting at sample r. If a batch has
fewer samples than there are ranks, some ranks get empty fields.

The loader keeps the batch at the cursor. With a CUDA device it also keeps the next batch, which is copied during
computation. The loader does not synchronize with other ranks. It identifies samples only by their index.
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
    """Issue a `PlimsollWarning` about a failure that was handled."""
    warnings.warn(text, PlimsollWarning, stacklevel=2)


@dataclass(frozen=True)
class Batch:
    """A batch, or the share of a batch that this rank reads.

    Attributes:
        fields: the tensors of the batch by name, on the device of the loader.
        sample_ids: the indices of the samples in ``fields``.
        epoch: the epoch of the batch.
        first_sample: the number of samples in earlier batches of the epoch, of all ranks together.
    """

    fields: dict[str, torch.Tensor]
    sample_ids: NDArray[np.int64]
    epoch: int
    first_sample: int


class Loader:
    """Endless batches of a data set. Iteration yields the fields of the remaining batches of the epoch.

    Args:
        dataset: a `Dataset`, which reads samples in batches; or any map-style data set of `torch.utils.data`.
        batches: the number of samples of a batch, or the rule that groups samples of similar length into batches.
        seed: a different seed draws a different order.
        shuffle: whether each epoch has a new order; `BlockShuffle` reads large files in large blocks.
        lengths: for buckets, the number of tokens of each sample if the data set has no ``lengths``.
        collate: for map-style data sets, a function that makes a batch from a list of samples. By default, ``collate``
            of the data set, or the default of torch.
        workers: the number of processes that read ahead. ``"auto"`` depends on cores and ``host_budget_bytes``, and is
            0 for data in memory-mapped files.
        prefetch: the number of batches that each worker reads ahead.
        device: the device to which the fields of a batch are moved.
        rank: the index of this process among the ``world_size`` processes that share each batch.
        world_size: the number of processes that share each batch.
        host_budget_bytes: the memory limit for ``"auto"`` workers and their batches, in bytes; ``None`` for no limit.
        on_event: called with a sentence for each failure that was handled; by default, a warning.
        oom_kills: a function that returns how many processes the kernel has killed so far because memory ran out. It
            shows whether a worker was killed for this reason. ``None``: the number is unknown.

    Raises:
        DataError: if the data set does not fill one batch, or its lengths do not fit the buckets.
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
            raise DataError(f"rank {rank} is not among {world_size} ranks: give a rank from 0 to {world_size - 1}")
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
        """Return the number of batches of the current epoch."""
        return self._batches.num_batches(self._cursor.epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch:
            fields = self.peek().fields
            self.advance()
            yield fields

    def peek(self) -> Batch:
        """Return the batch at the cursor, without moving the cursor."""
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
        """Return the state to checkpoint as integers: the epoch, the position in it, and hashes of the data and order.

        The hash of the data is missing if its content cannot be determined (`plimsoll.data.samples.fingerprint`).
        """
        return self._batches.state(self._cursor) | ({} if self._mark is None else {"data": self._mark})

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move the cursor to the position at which `state_dict` was called.

        Raises:
            CheckpointError: if ``state`` is not from `state_dict`, or is for another seed, order, data set or buckets.
                The cursor does not move.
        """
        cursor = self._batches.cursor(state)
        if cursor != Cursor() and None not in {self._mark, state.get("data")} and self._mark != state["data"]:
            raise CheckpointError(
                f"the checkpoint belongs to other data with the same number of samples "
                f"({state['num_samples']:,}): resume with the data of that run"
            )
        self._cursor = cursor
        self._moving.clear()

    @cached_property
    def _mark(self) -> int | None:
        return mark_of(self._dataset, self._workers)

    def close(self) -> None:
        """End the worker processes. The next requested batch starts them again."""
        self._feed.close()

    def _moved(self, cursor: Cursor) -> Moving:
        if cursor not in self._moving:
            self._moving[cursor] = self._transfer.begin(self._feed.fields(cursor))
        return self._moving[cursor]


class _Share:
    """The samples of each batch that one rank reads: every ``world_size``-th sample, starting at sample ``rank``."""

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
    """A map-style data set of `torch.utils.data`, read in batches."""

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
    """Yield every sample once, in the order of the data set; the last batch may be smaller.

    Each of ``world_size`` ranks gets every ``world_size``-th sample of a batch, or empty fields if it has none.
    """
    for start in range(0, len(dataset), batch_size):
        ids = np.arange(start, min(start + batch_size, len(dataset)))[rank::world_size]
        yield Batch(dataset.batch(ids) if len(ids) else {}, ids, 0, start)
