"""Tokens as samples: fixed windows for language modelling, whole texts with a label for classification.

A dataset here has a length and `batch(ids)`, one vectorised gather from the memory map; nothing is kept in memory. The
held-out share is drawn by a keyed permutation, so a split of any size is two small objects, not two lists. NOT covered:
overlapping windows, attention that stops at the border between two texts of a window, lengths grouped in buckets.

Shapes: B samples of the batch, T tokens of a sample.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.order import Order
from plimsoll.data.tokens import TokenStore
from plimsoll.errors import DataError

_ITEMS_PER_PASS = 1 << 20


class Dataset(Protocol):
    """Samples by number, in batches."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def batch(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return the samples ``ids`` stacked field by field, the batch first."""
        ...


class WindowDataset:
    """All texts laid end to end, the end token after each, cut into windows of ``sequence_length`` tokens.

    Raises:
        DataError: if the text does not fill one window.
    """

    def __init__(self, store: TokenStore, sequence_length: int) -> None:
        num_windows, self.num_dropped_tokens = divmod(len(store.tokens), sequence_length)
        if not num_windows:
            raise DataError(
                f"the text has {len(store.tokens)} tokens, but one sample is sequence_length = {sequence_length}: give "
                f"more text, or shorten it with --set sequence_length={max(len(store.tokens) // 2, 2)}"
            )
        self._windows = store.tokens[: num_windows * sequence_length].reshape(num_windows, sequence_length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: field[0] for name, field in self.batch(np.array([range(len(self))[number]])).items()}

    def batch(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels`` (B, T): one and the same tensor, for the model shifts the labels."""
        input_ids_BT = torch.from_numpy(self._windows[ids].astype(np.int64))
        return {"input_ids": input_ids_BT, "labels": input_ids_BT}


class DocumentDataset:
    """One sample per text, with its label, truncated to ``sequence_length`` tokens.

    A text without a token (white space, to some tokenizers) is its end token, so that every sample has one.

    Args:
        store: the texts.
        labels: the class of every text.
        sequence_length: the most tokens of a sample.
        pad_id: the token that fills the rows of a batch up to its longest.
    """

    def __init__(self, store: TokenStore, labels: NDArray[np.integer], sequence_length: int, pad_id: int) -> None:
        assert len(store.ends) == len(labels), (len(store.ends), len(labels))
        self._store, self._labels = store, labels
        self._sequence_length, self._pad_id = sequence_length, pad_id
        self.num_truncated = sum(
            int(
                np.count_nonzero(
                    self._lengths(np.arange(begin, min(begin + _ITEMS_PER_PASS, len(labels)))) > sequence_length
                )
            )
            for begin in range(0, len(labels), _ITEMS_PER_PASS)
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: field[0] for name, field in self.batch(np.array([range(len(self))[number]])).items()}

    def batch(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``attention_mask`` (B, T), T the longest of these samples, and ``labels`` (B,)."""
        lengths_B = np.clip(self._lengths(ids), 1, self._sequence_length)
        places_T = np.arange(lengths_B.max())
        inside_BT = places_T < lengths_B[:, None]
        places_BT = np.where(inside_BT, self._starts(ids)[:, None] + places_T, 0)
        input_ids_BT = np.where(inside_BT, self._store.tokens[places_BT], self._pad_id)
        return {
            "input_ids": torch.from_numpy(input_ids_BT.astype(np.int64)),
            "attention_mask": torch.from_numpy(inside_BT.astype(np.int64)),
            "labels": torch.from_numpy(self._labels[ids].astype(np.int64)),
        }

    def _starts(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(ids > 0, self._store.ends[ids - 1] + 1, 0)

    def _lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._store.ends[ids] - self._starts(ids)


class Selection:
    """Some samples of a dataset in a drawn order: ``selection[positions]`` are their numbers. Takes no memory."""

    def __init__(self, order: Order, start: int, stop: int) -> None:
        self._order, self._start, self._stop = order, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._order.at(0, positions + self._start)


class Subset:
    """The selected samples of a dataset, as a dataset."""

    def __init__(self, dataset: Dataset, ids: Selection | NDArray[np.int64]) -> None:
        self._dataset, self._ids = dataset, ids

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return the samples at these positions of the selection."""
        return self._dataset.batch(self._ids[ids])


def split(num_samples: int, share: float, seed: int) -> tuple[Selection, Selection]:
    """Draw ``share`` of the samples for validation; return the (train, validation) selections, which share no sample.

    Args:
        num_samples: the length of the dataset.
        share: from 0 to less than 1; with more than 0 at least one sample is held out, and at least one stays.
        seed: another seed draws other samples.

    Raises:
        DataError: if a share is to be held out of fewer than 2 samples.
    """
    num_held_out = min(max(round(num_samples * share), 1), num_samples - 1) if share else 0
    if share and num_samples < 2:
        raise DataError(
            f"cannot hold out a share of {share:g} of {num_samples} sample: give more text, a shorter sequence_length, "
            f"or a file for data.validation"
        )
    order = Order(num_samples, seed)
    return Selection(order, num_held_out, num_samples), Selection(order, 0, num_held_out)
