"""A guess of the tensor that was requested when memory ran out, from its size and the tensors in the line that failed.

Three shapes are tried in this order: the shape of a tensor at hand; the product of a tensor and a matrix (``x @ w.T``,
a layer of a module); the product of two tensors (``q @ k.transpose(-2, -1)``). The first shape with the requested size
is returned, so the result is likely and not certain. Sizes below 64 KiB are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, product
from math import prod
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LEAST_BYTES = 64 << 10
_MOST_TENSORS = 64


class Asked(NamedTuple):
    """A tensor that may have been requested: its shape and type, which give the requested size.

    ``how`` describes the operation that would have created it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    how: str


def tensors_at_hand(frames: Iterable[FrameType]) -> list[Tensor]:
    """Return up to 64 tensors that local variables of the frames hold, also as parameters of modules."""
    found = {id(one): one for frame in frames for value in list(frame.f_locals.values()) for one in _tensors(value)}
    return list(islice(found.values(), _MOST_TENSORS))


def tensor_asked(num_bytes: int | None, at_hand: Iterable[Tensor]) -> Asked | None:
    """Return the shape and type of the tensor that was requested, as guessed from its size.

    Args:
        num_bytes: the requested size; ``None`` if unknown.
        at_hand: tensors that the failed operation may have used.

    Returns:
        the first match; ``None`` if no shape derived from these tensors has the requested size.
    """
    if num_bytes is None or num_bytes < _LEAST_BYTES:
        return None
    tensors = list(at_hand)
    tries = (one for find in (_alike, _layers, _products) for one in find(tensors))
    return next((one for one in tries if prod(one.shape) * one.dtype.itemsize == num_bytes), None)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from islice(value.parameters(recurse=False), 4)
        for child in islice(value.children(), 16):
            yield from islice(child.parameters(recurse=False), 2)
    elif isinstance(value, list | tuple):
        yield from (one for one in value[:4] if isinstance(one, Tensor))


def _alike(tensors: list[Tensor]) -> Iterator[Asked]:
    yield from (Asked(tuple(one.shape), one.dtype, "a result of the shape of one of its tensors") for one in tensors)


def _layers(tensors: list[Tensor]) -> Iterator[Asked]:
    for one, weight in product(tensors, tensors):
        if one.dim() >= 2 and weight.dim() == 2 and one.shape[-1] == weight.shape[1]:
            shape = (*one.shape[:-1], weight.shape[0])
            yield Asked(shape, weight.dtype, "one of its tensors times a matrix")


def _products(tensors: list[Tensor]) -> Iterator[Asked]:
    for one, other in product(tensors, tensors):
        if one.dim() != other.dim() or one.dim() < 2 or one.shape[:-2] != other.shape[:-2]:
            continue
        if one.shape[-1] == other.shape[-1]:
            yield Asked((*one.shape[:-1], other.shape[-2]), one.dtype, "the product of two of its tensors")
        if one.shape[-1] == other.shape[-2]:
            yield Asked((*one.shape[:-1], other.shape[-1]), one.dtype, "the product of two of its tensors")
