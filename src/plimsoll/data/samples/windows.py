"""Tokens as samples: the interface of all datasets, fixed windows of a token stream, and splits.

A dataset has a length and a method `batch(ids)`, which is one vectorized gather from the memory-mapped file. No samples
are kept in memory. It is also an ordinary map-style ``torch.utils.data`` dataset with a `collate` method. The held-out
share is drawn by a keyed permutation, so a split of any size is two small objects instead of two lists.

Texts as separate samples, whole or cut into windows, are in `plimsoll.data.samples.texts`. Rows of whole texts
without attention between them are in `plimsoll.data.samples.packing`. Batches are made in
`plimsoll.data.batches.batching`.

Shapes: B samples of the batch, T tokens of a sample.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.order import BlockShuffle, Order, Unshuffled
from plimsoll.data.samples.text_windows import checked_stride, num_windows, refuse_no_window
from plimsoll.data.text.held_out import num_held_out
from plimsoll.data.tokens.store import Tokens
from plimsoll.files.checksums import require_runs

IGNORED_LABEL = -100  # the default `ignore_index` of torch.nn.functional.cross_entropy


class Dataset(Protocol):
    """Samples by index, returned in batches."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return the samples ``ids`` stacked per field, batch dimension first; ``epoch`` selects the augmentation."""
        ...

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, which determines the width of a batch."""
        ...


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]], ABC):
    """A base class that makes a ``torch.utils.data`` dataset from a `batch` method.

    It adds access to single samples, to lists of samples, and `collate`. A
    ``DataLoader(dataset, batch_size=8, collate_fn=dataset.collate)`` yields the same batches as `batch`.

    ``padding`` maps each padded field to its padding value. If it is empty, all rows have equal length.
    """

    block_samples = BlockShuffle.block_samples  # consecutive samples in a block, if the order is shuffled in blocks
    reads_fast = True  # from a memory-mapped file; to get a batch from a worker process would take longer
    sequence_length: int
    pad_multiple = 1
    padding: Mapping[str, int] = MappingProxyType({})
    epoch = 0

    @property
    def num_truncated(self) -> int:
        """The number of samples that were truncated when they were read; 0 if samples are prepared in advance."""
        return 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return the samples ``ids`` stacked per field, batch dimension first; ``epoch`` selects the augmentation."""

    @abstractmethod
    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, before augmentation."""

    def padded_length(self, longest: int) -> int:
        """Return the row length of a batch whose longest sample has ``longest`` tokens."""
        return min(-(-longest // self.pad_multiple) * self.pad_multiple, self.sequence_length)

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentation of samples that are fetched by index. Call this method before each epoch."""
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return samples without padding. A negative index counts from the end."""
        valid = range(len(self))
        batch = self.batch(np.array([valid[number] for number in numbers], np.int64), self.epoch)
        lengths = batch["attention_mask"].sum(1).tolist() if self.padding else [self.sequence_length] * len(numbers)
        return [
            {name: field[row, :length] if name in self.padding else field[row] for name, field in batch.items()}
            for row, length in enumerate(lengths)
        ]

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad and stack single samples; the result equals `batch` of these samples."""
        length = self.padded_length(max(len(sample["input_ids"]) for sample in samples))
        return {
            name: torch.stack([self._padded(name, sample[name], length) for sample in samples]) for name in samples[0]
        }

    def _padded(self, name: str, field: torch.Tensor, length: int) -> torch.Tensor:
        if name not in self.padding:
            return field
        return torch.nn.functional.pad(field, (0, length - len(field)), value=self.padding[name])


class WindowDataset(Samples):
    """All texts end to end, with an end token after each, cut into windows of ``sequence_length`` tokens.

    If ``stride`` is less than the length, windows overlap, so tokens have more left context. A token that an earlier
    window predicts has the label -100. So every token except the first is predicted exactly once.

    Args:
        store: the tokens of all texts.
        sequence_length: the number of tokens of a window.
        stride: the number of tokens from the beginning of a window to the next beginning, from 1 to ``sequence_length``
            (the default).

    Raises:
        DataError: if the text does not fill one window, or the stride is out of range.
    """

    def __init__(self, store: Tokens, sequence_length: int, stride: int | None = None) -> None:
        self.stride = checked_stride(stride, sequence_length)
        self.sequence_length, self._store = sequence_length, store
        num_tokens = len(store.tokens)
        refuse_no_window(num_tokens, sequence_length)
        self._num_windows = num_windows(num_tokens, sequence_length, stride)
        self._windows: NDArray[Any] | None = None  # a strided view, if the tokens are one array
        if isinstance(store.tokens, np.ndarray):
            tokens = np.asarray(store.tokens)
            self._windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length)[:: self.stride]
        self.num_dropped_tokens = num_tokens - sequence_length - (self._num_windows - 1) * self.stride

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowDataset, (self._store, self.sequence_length, self.stride)

    def __len__(self) -> int:
        return self._num_windows

    @property
    def fingerprint(self) -> str | None:
        """A string that differs if the samples differ; ``None`` if the tokens are in no store."""
        folder = getattr(self._store, "folder", None)
        return None if folder is None else f"{folder.name} {self.sequence_length} {self.stride}"

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels`` (B, T) int64, for a model that shifts the labels."""
        if self._windows is not None:
            require_runs(self._store.tokens, ids * self.stride, ids * self.stride + self.sequence_length)
            tokens_BT = self._windows[ids]
        else:
            tokens_BT = self._store.tokens[(ids * self.stride)[:, None] + np.arange(self.sequence_length)]
        input_ids_BT = torch.from_numpy(tokens_BT.astype(np.int64))
        labels_BT = input_ids_BT.clone()  # a copy, because a model may mask its inputs in place
        num_repeated = self.sequence_length - self.stride
        labels_BT[torch.from_numpy(ids > 0), :num_repeated] = IGNORED_LABEL
        return {"input_ids": input_ids_BT, "labels": labels_BT}

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``sequence_length`` for each sample."""
        return np.full(len(ids), self.sequence_length)


class Selection:
    """Some samples of a dataset in some order. ``selection[positions]`` computes their indices in the dataset."""

    def __init__(self, order: Order | Unshuffled, start: int, stop: int) -> None:
        self._order, self._start, self._stop = order, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Values that identify this selection among all selections of the same size."""
        return *self._order.identity, self._start, self._stop

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._order.at(0, positions + self._start)


class Subset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of the selected samples of another dataset."""

    def __init__(self, dataset: Samples, ids: Selection | NDArray[np.int64]) -> None:
        self._dataset, self._ids = dataset, ids
        self.reads_fast, self.pad_multiple = dataset.reads_fast, dataset.pad_multiple
        self.sequence_length, self.block_samples = dataset.sequence_length, dataset.block_samples

    @property
    def num_truncated(self) -> int:
        """The number of samples of the whole dataset that were truncated when they were read."""
        return self._dataset.num_truncated

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def fingerprint(self) -> str | None:
        """A string that differs if the samples differ; ``None`` if the dataset has no fingerprint."""
        of_all, some = getattr(self._dataset, "fingerprint", None), self._ids
        chosen = some.identity if isinstance(some, Selection) else zlib.crc32(np.ascontiguousarray(some).data)
        return None if of_all is None else f"{of_all} {chosen}"

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return the samples at the positions ``ids`` of the selection."""
        return self._dataset.batch(self._ids[ids], epoch)

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample at the positions ``ids`` of the selection."""
        return self._dataset.lengths(self._ids[ids])

    def padded_length(self, longest: int) -> int:
        """Return the row length of a batch, see `Samples.padded_length`."""
        return self._dataset.padded_length(longest)

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentation, see `Samples.set_epoch`."""
        self._dataset.set_epoch(epoch)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return samples without padding, see `Samples.__getitems__`."""
        valid = range(len(self))
        return self._dataset.__getitems__(self._ids[np.array([valid[number] for number in numbers])].tolist())

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad and stack single samples, see `Samples.collate`."""
        return self._dataset.collate(samples)


def split(num_samples: int, share: float, seed: int, is_drawn: bool = True) -> tuple[Selection, Selection]:
    """Split samples into training and validation selections, which are disjoint.

    Args:
        num_samples: the length of the dataset.
        share: the fraction for validation, from 0 to less than 1. If it is positive, both selections have at least one
            sample.
        seed: a different seed draws different samples.
        is_drawn: whether validation samples are drawn at random, and both selections are shuffled. Otherwise validation
            gets the last samples, and the order is kept.

    Returns:
        the training selection, and the validation selection.

    Raises:
        DataError: if a share is to be held out of fewer than 2 samples.
    """
    num_validation = num_held_out(num_samples, share)
    if not is_drawn:
        as_is, num_training = Unshuffled(num_samples, seed), num_samples - num_validation
        return Selection(as_is, 0, num_training), Selection(as_is, num_training, num_samples)
    order = Order(num_samples, seed)
    return Selection(order, num_validation, num_samples), Selection(order, 0, num_validation)
