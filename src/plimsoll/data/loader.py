"""Batches with a cursor that moves only when told to, so a step that was undone gets the same samples again.

A batch is a pure function of (seed, epoch, position): `Loader.peek` may be called any number of times, in any process,
and a loader resumed at a cursor goes on exactly as one that was never stopped. The loader keeps no batch. The last
batch of an epoch is smaller; none spills into the next epoch and no sample is dropped. It reads in the calling process:
from a memory map a batch takes far less time than a step. There are NO worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.order import Order
from plimsoll.data.windows import Dataset
from plimsoll.errors import CheckpointError, DataError


@dataclass(frozen=True)
class Batch:
    """Some samples: their tensors, their numbers in the dataset, and the place of the first in the epoch's order."""

    fields: dict[str, torch.Tensor]
    sample_ids: NDArray[np.int64]
    epoch: int
    first_sample: int


class Loader:
    """Endless batches of a dataset, epoch after epoch, in a new order each if ``shuffle``.

    Raises:
        DataError: if the dataset does not fill one batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"the data has {len(dataset)} samples, but one step takes batch_size = {batch_size}: give more text, a "
                f"shorter sequence_length, or a smaller batch with --set batch_size={max(len(dataset), 1)}"
            )
        self._dataset, self._batch_size = dataset, batch_size
        self._order = Order(len(dataset), seed) if shuffle else None
        self._epoch, self._position = 0, 0

    @property
    def batches_per_epoch(self) -> int:
        """How many batches one epoch has, the smaller last one included."""
        return -(-len(self._dataset) // self._batch_size)

    def peek(self) -> Batch:
        """Return the next batch and leave the cursor where it is."""
        stop = self._stop()
        if self._order is None:
            ids = np.arange(self._position, stop)
        else:
            ids = self._order.ids(self._epoch, self._position, stop)
        return Batch(self._dataset.batch(ids), ids, self._epoch, self._position)

    def advance(self) -> None:
        """Move the cursor past the batch that `peek` returns."""
        self._position = self._stop()
        if self._position == len(self._dataset):
            self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: the epoch and how many of its samples are done."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move the cursor to where `state_dict` was called.

        Raises:
            CheckpointError: if that place is not in this dataset.
        """
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < len(self._dataset):
            raise CheckpointError(
                f"the checkpoint is at sample {position} of epoch {epoch}, but the data has {len(self._dataset)} "
                f"samples, so it is not the data of that run: resume with the same text, sequence_length and share"
            )
        self._epoch, self._position = epoch, position

    def _stop(self) -> int:
        return min(self._position + self._batch_size, len(self._dataset))


def iterate_once(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield every sample once, in the order of the dataset; the last batch may be smaller."""
    for start in range(0, len(dataset), batch_size):
        ids = np.arange(start, min(start + batch_size, len(dataset)))
        yield Batch(dataset.batch(ids), ids, 0, start)
