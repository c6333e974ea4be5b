"""The arithmetic on batches: sizes, units, cutting, picking, moving.

A batch is a tensor; a dictionary (also a transformers ``BatchEncoding``), tuple, list or named tuple of tensors, nested
as one likes; or such a container with plain lists of one item per sample among its values. Dimension 0 is the sample.

It does NOT cover a list of one tensor per sample (collate it first), tensors whose dimension 0 is not the sample (a
mask shared by all samples, time-first recurrent input), and packed sequences: cutting one of them could drop or repeat
samples. Sizes in dimension 0 that disagree and types that are not known are refused by name. Sizes that agree by chance
are NOT noticed: a list of tensors is a list of fields, so one of equally long per-sample tensors is cut through each
sample, and so is time-first input whose sequences are as many as they are long.
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
"""What a loss averages over; see `count_units`."""

IGNORED_LABEL = -100
"""The label that ``torch.nn.functional.cross_entropy`` leaves out, its default ``ignore_index``."""


def count_units(batch: Any, units: Units) -> float:
    """Count what the mean loss of ``batch`` is divided by, so that losses of unequal micro-batches add up exactly.

    Args:
        batch: a batch on the CPU (on another device, reading the count waits for that device).
        units: ``"samples"`` is the size of dimension 0; ``"tokens"`` the labels other than -100; ``"next-tokens"`` the
            same without the first position of each sequence, for models that shift the labels inside (causal language
            models: nothing predicts the first token); or a function from a batch to a number, such as the sum of the
            weights of its labels.

    Raises:
        InputError: if the batch has no ``labels`` to count tokens in, or no size (see `batch_size_of`), or a function
            returns what is no number from 0 on.
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
    """What a function of the user's counted, which may be a tensor of one number."""
    number = count.item() if isinstance(count, Tensor | np.generic) else count
    if isinstance(number, int | float) and 0 <= number < math.inf:
        return number
    raise InputError(
        f"units(batch) returned {count!r}, a {type(count).__name__}: return a number from 0 on, of samples, of tokens "
        "or of their weights"
    )


def batch_size_of(batch: Any) -> int:
    """Count the samples of a batch.

    Raises:
        InputError: if two fields have different sizes in dimension 0, no field has a size, a field cannot be cut, or
            there are no samples.
    """
    sizes = {path: size for path, leaf in leaves_of(batch) if (size := _num_samples_of(leaf, path)) is not None}
    if not sizes:
        raise InputError(
            f"cannot tell how many samples a batch has that holds no tensor and no list, but a {type(batch).__name__}: "
            "put one in"
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
    """Count the elements of all tensors of a batch, which is what its memory follows."""
    return sum(leaf.numel() for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def split_batch(batch: Any, num_samples: int) -> list[Any]:
    """Cut a batch into micro-batches of ``num_samples`` samples, the last one what is left; order and samples stay.

    Containers keep their type, tensors become views (nothing is copied), and single values (numbers, texts, ``None``,
    0-dimensional tensors) are in every micro-batch.

    Raises:
        InputError: as `batch_size_of`, or if ``num_samples`` is less than 1.
    """
    if num_samples < 1:
        raise InputError(f"cannot cut a batch into pieces of {num_samples} samples: give 1 or more")

    def micro_batch(start: int) -> Any:
        return map_leaves(
            batch, lambda leaf: leaf if _num_samples_of(leaf) is None else leaf[start : start + num_samples]
        )

    return [micro_batch(start) for start in range(0, batch_size_of(batch), num_samples)]


def pick_samples(batch: Any, numbers: Sequence[int]) -> Any:
    """Return the samples with these numbers, in this order, as a batch like ``batch``; tensors are copied."""

    def picked(leaf: Any) -> Any:
        if _num_samples_of(leaf) is None:
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, torch.tensor(numbers, device=leaf.device))
        return leaf[list(numbers)] if isinstance(leaf, np.ndarray) else type(leaf)(leaf[number] for number in numbers)

    return map_leaves(batch, picked)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on ``device``; other values stay as they are.

    Only a copy from pinned memory runs beside the computation: from pageable memory it would not, and the caller could
    change the source while it is read.
    """

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=leaf.is_pinned()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(batch, moved)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf of a batch; containers keep their type."""
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
    """Yield the dotted name and the value of every leaf of a batch."""
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
    """Whether a list or tuple holds the fields of a batch; one without a tensor in it holds one item per sample."""
    if not isinstance(value, list | tuple):
        return False
    return hasattr(value, "_fields") or any(
        isinstance(item, Tensor | np.ndarray | MutableMapping) or _is_container(item) for item in value
    )


def _num_samples_of(leaf: Any, path: str = "batch") -> int | None:
    """Return how many samples a leaf has, or ``None`` if it belongs to all of them."""
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
