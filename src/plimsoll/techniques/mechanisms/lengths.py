"""Micro-batches of samples of similar length, without the columns that are padding in all of them.

A sample ends at its last position that the ``attention_mask`` marks or that has a label. (Decoder labels of an
encoder-decoder model may by chance have as many columns as the encoder input.) A batch is split by number of samples,
as usual, if lengths are unknown: without an ``attention_mask`` of (B, T), or with a field of T columns that is not in
`_FIELDS`. Such a field may or may not run along time.

Samples are not trimmed on the left, because a language model predicts the first token from the padding before it.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.data.batch import IGNORED_LABEL, count_elements, pick_samples
from plimsoll.memory.known_values import values_of
from plimsoll.models.hooks import BY_SAMPLES

_FIELDS = ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids")
"""Fields that are trimmed if their shape is (B, T)."""

_FEWEST_COLUMNS = 8
"""The least number of columns that a sample is counted with, even if it is shorter.

A sample also takes memory that is independent of its length, and attention and matrix kernels work on blocks of 8.
"""

Group = tuple[Sequence[int], int]
"""The indices of some samples of a batch, and the number of columns to keep."""


class CutByLength:
    """A `plimsoll.models.hooks.Cut` that puts samples of similar length together, and more of them if they are short.

    Args:
        full_length: number of tokens of the longest sample in the data; ``None``: use the longest of each batch.
    """

    depends_on_values = True

    def __init__(self, full_length: int | None = None) -> None:
        self._full_length = full_length

    def elements_per_sample(self, batch: Any, batch_size: int) -> float:
        """Return the number of tensor elements of a sample of full length, so that one limit holds for all batches.

        If the full length or the lengths in the batch are unknown, return the mean number of elements of its samples.
        """
        full_elements = elements_of_full_length(batch, self._full_length) if self._full_length is not None else None
        return BY_SAMPLES.elements_per_sample(batch, batch_size) if full_elements is None else full_elements

    def micro_batches(
        self, batch: Any, batch_size: int, micro_batch: int, count: Callable[[Any], float]
    ) -> Iterator[tuple[Any, float, Sequence[int]]]:
        """Yield micro-batches of samples of similar length, without columns that are only padding.

        If lengths are unknown, yield the same as `BySamples`.
        """
        groups = groups_by_length(batch, micro_batch, self._full_length)
        if groups is None:
            yield from BY_SAMPLES.micro_batches(batch, batch_size, micro_batch, count)
        elif len(groups) == 1:
            yield trimmed(batch, groups[0][1]), count(batch), range(batch_size)
        else:
            for numbers, num_columns in groups:
                part = pick_samples(batch, numbers)
                if num_units := count(part):
                    yield trimmed(part, num_columns), num_units, numbers


def groups_by_length(batch: Any, num_samples: int, full_length: int | None = None) -> list[Group] | None:
    """Split a batch into groups of similar length, the longest first.

    Args:
        batch: the batch.
        num_samples: number of samples of full length per group. A group of shorter samples may have more samples, up to
            the same number of elements in all fields.
        full_length: number of tokens of a sample of full length, if all samples of this batch may be shorter. ``None``:
            the number of columns of the batch.

    Returns:
        The groups, in which each sample occurs once; ``None`` if lengths are unknown.
    """
    lengths = lengths_of(batch)
    if lengths is None:
        return None
    if num_samples >= len(lengths):
        return [(range(len(lengths)), max(lengths))]
    elements = _elements_by_length(batch)
    most_elements = num_samples * elements(max(batch["attention_mask"].shape[1], full_length or 0))
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])  # stable: equal lengths keep their order
    groups: list[Group] = []
    while order:
        longest = lengths[order[0]]
        taken = most_elements // elements(longest)
        groups.append((order[:taken], longest))
        order = order[taken:]
    return groups


def elements_of_full_length(batch: Any, full_length: int) -> int | None:
    """Return the number of tensor elements of a sample with ``full_length`` tokens, or more if the batch has more.

    ``None``: the lengths of the samples in the batch are unknown.
    """
    if lengths_of(batch) is None:
        return None
    return _elements_by_length(batch)(max(batch["attention_mask"].shape[1], full_length))


def _elements_by_length(batch: Mapping[str, Any]) -> Callable[[int], int]:
    """Return a function that maps the length of a sample to the number of elements that it takes in all fields."""
    num_samples, num_columns = batch["attention_mask"].shape
    along_time = sum(1 for _ in _trimmable(batch, num_columns))
    beside_time = count_elements(batch) // num_samples - along_time * num_columns
    return lambda length: beside_time + along_time * max(length, min(_FEWEST_COLUMNS, num_columns))


def lengths_of(batch: Any) -> list[int] | None:
    """Return, for each sample, the number of columns up to its end; ``None`` if lengths are unknown.

    A sample that is all padding counts as full length, because its attention is spread over all columns.
    """
    mask_BT = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask_BT, Tensor) or mask_BT.ndim != 2 or _has_other_of(batch, mask_BT.shape[1]):
        return None
    num_columns = mask_BT.shape[1]
    is_inside_BT = mask_BT != 0
    has_token_B = is_inside_BT.any(dim=1)
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask_BT.shape:
        is_inside_BT = is_inside_BT | (labels != IGNORED_LABEL)
    places_T = torch.arange(1, num_columns + 1, device=mask_BT.device)
    ends_B = (is_inside_BT * places_T).amax(dim=1)
    return values_of(torch.where(has_token_B, ends_B, torch.full_like(ends_B, num_columns)))


def trimmed(batch: Any, num_columns: int) -> Any:
    """Return a batch of known lengths with only its first ``num_columns`` columns; trimmed fields are copied."""
    before = batch["attention_mask"].shape[1]
    if num_columns == before:
        return batch
    cut = copy.copy(batch)
    for name in _trimmable(batch, before):
        cut[name] = batch[name][:, :num_columns].contiguous()
    return cut


def _trimmable(batch: Mapping[str, Any], num_columns: int) -> Iterator[str]:
    for name in _FIELDS:
        field = batch.get(name)
        if isinstance(field, Tensor) and field.ndim == 2 and field.shape[1] == num_columns:
            yield name


def _has_other_of(batch: Mapping[str, Any], num_columns: int) -> bool:
    """Return whether a field that cannot be trimmed has a dimension of ``num_columns``, or cannot be inspected."""
    known = set(_trimmable(batch, num_columns))
    others = [value for name, value in batch.items() if name not in known]
    return any(
        num_columns in value.shape[1:] if isinstance(value, Tensor | np.ndarray) else _holds_others(value)
        for value in others
    )


def _holds_others(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping)
