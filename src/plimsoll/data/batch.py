"""Operations on batches: size, loss units, splitting, selection of samples, and transfer to a device.

A batch is a tensor, or a dictionary (also a transformers ``BatchEncoding``), tuple, list or named tuple of tensors,
with any nesting. Such a container may also have plain lists with one item per sample. Dimension 0 indexes the samples.

Not handled: a list of one tensor per sample (collate it first), and packed sequences. Also not handled: tensors whose
dimension 0 does not index the samples (a mask shared by all samples, time-first recurrent input). Splitting such a
tensor could drop or repeat samples. Sizes in dimension 0 that disagree and unknown types are refused with the name of
the field. Sizes that agree by chance are NOT detected. A list of tensors is a list of fields, so a list of equally long
tensors, one per sample, is split inside each sample. The same happens to time-first input with as many sequences as
time steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plimsoll.errors import InputError

Units = Literal["samples", "tokens", "next-tokens"] | Callable[[Any], float]
"""The units over which a loss averages, see `count_units`."""

IGNORED_LABEL = -100
"""The default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


def count_units(batch: Any, units: Units) -> float:
    """Count the units over which the loss of a batch averages, to weight the losses of unequal micro-batches exactly.

    Args:
        batch: a batch on the CPU. On another device, reading the count waits for that device.
        units: ``"samples"`` is the size of dimension 0, and ``"tokens"`` the number of labels other than -100.
            ``"next-tokens"`` does not count the first position of each sequence. It is for models that shift the labels
            internally (causal language models), because nothing predicts the first token. A function takes a batch and
            returns a number, such as the sum of the weights of its labels.

    Raises:
        InputError: if the batch has no ``labels`` to count, or `batch_size_of` raises it. Also if a function does not
            return a number of at least 0.
    """
    if callable(units):
        return _number_of(units(batch))
    if units == "samples":
        return batch_size_of(batch)
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise InputError(
            f"cannot count {units} in a batch without `labels`: give the units as a function batch -> number"
        )
    labels = batch["labels"]
    averaged = labels[..., 1:] if units == "next-tokens" else labels
    return int((averaged != IGNORED_LABEL).sum())


def _number_of(count: Any) -> float:
    """Check and return the number that a user's function returned, possibly as a tensor with one element."""
    number = count.item() if isinstance(count, Tensor | np.generic) else count
    if isinstance(number, int | float) and 0 <= number < math.inf:
        return number
    raise InputError(
        f"units(batch) returned {count!r}, a {type(count).__name__}: return a number of at least 0, such as the number "
        "of samples or tokens, or the sum of their weights"
    )


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        InputError: if two fields have different sizes in dimension 0, no field has a size, a field cannot be split, or
            there are no samples.
    """
    sizes = {path: size for path, leaf in leaves_of(batch) if (size := _num_samples_of(leaf, path)) is not None}
    if not sizes:
        raise InputError(
            f"cannot tell how many samples a batch has, because it (a {type(batch).__name__}) holds no tensor and no "
            "list: put one in"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise InputError(
            f"cannot cut a batch whose fields have different numbers of samples in dimension 0 ({listed}): "
            "make dimension 0 of every field the sample"
        )
    num_samples = next(iter(sizes.values()))
    if num_samples == 0:
        raise InputError(
            f"a batch of 0 samples (a {type(batch).__name__}) has no mean loss: leave out empty batches, or empty files"
        )
    return num_samples


def count_elements(batch: Any) -> int:
    """Return the number of elements of all tensors of a batch, as a measure of the memory that it needs."""
    return sum(leaf.numel() for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def split_batch(batch: Any, num_samples: int) -> list[Any]:
    """Split a batch into micro-batches of ``num_samples`` samples, in order; the last one may be smaller.

    Containers keep their type, and tensors become views (nothing is copied). Single values (numbers, texts, ``None``,
    0-dimensional tensors) are in every micro-batch.

    Raises:
        InputError: if `batch_size_of` raises it, or ``num_samples`` is less than 1.
    """
    if num_samples < 1:
        raise InputError(f"cannot cut a batch into micro-batches of {num_samples} samples: give 1 or more")

    def micro_batch(start: int) -> Any:
        return map_leaves(
            batch, lambda leaf: leaf if _num_samples_of(leaf) is None else leaf[start : start + num_samples]
        )

    return [micro_batch(start) for start in range(0, batch_size_of(batch), num_samples)]


def pick_samples(batch: Any, numbers: Sequence[int]) -> Any:
    """Return a batch of the samples with the indices ``numbers``, in this order. Tensors are copied."""

    def picked(leaf: Any) -> Any:
        if _num_samples_of(leaf) is None:
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, torch.tensor(numbers, device=leaf.device))
        return leaf[list(numbers)] if isinstance(leaf, np.ndarray) else type(leaf)(leaf[number] for number in numbers)

    return map_leaves(batch, picked)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on ``device``. Other values are unchanged.

    The copy is asynchronous only from pinned memory. From pageable memory it would not overlap with computation, and
    the caller could change the source during the copy.
    """

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=leaf.is_pinned()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(batch, moved)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch with every leaf replaced by ``function(leaf)``. Containers keep their type."""
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_leaves(item, function)
        return mapped
    if _is_container(value):
        items = [map_leaves(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every leaf (tensor, list of items or single value) of a batch."""
    if isinstance(value, MutableMapping):
        named: Iterable[tuple[Any, Any]] = value.items()
    elif _is_container(value):
        named = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    else:
        yield path or "batch", value
        return
    for name, item in named:
        yield from leaves_of(item, f"{path}.{name}" if path else str(name))


def _is_container(value: Any) -> bool:
    """Return whether a value is a list or tuple of fields. A list without tensors has one item per sample instead."""
    if not isinstance(value, list | tuple):
        return False
    return hasattr(value, "_fields") or any(
        isinstance(item, Tensor | np.ndarray | MutableMapping) or _is_container(item) for item in value
    )


def _num_samples_of(leaf: Any, path: str = "batch") -> int | None:
    """Return the number of samples of a leaf, or ``None`` for a single value, which belongs to all samples."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.shape[0] if leaf.ndim else None
    if isinstance(leaf, list | tuple):
        return len(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes):
        return None
    raise InputError(
        f"cannot cut field {path} of a batch: a {type(leaf).__name__} is not a tensor, a list or a single value; "
        "make it one of these when the batch is collated"
    )
