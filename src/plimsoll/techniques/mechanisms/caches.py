"""Caches of keys and values among the arguments of a call that will be made a second time.

A Hugging Face model in training fills its cache as it goes (``use_cache`` is on by default): a block's second pass must
find the cache as the first did, and the caller's must not change again. So a copy of its structure is kept, which
shares the tensors; of the layers of other blocks not even these, so that nothing lives longer than it would.

Does NOT cover caches that are written in place (``StaticCache``), which no training uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_MODULE = "transformers.cache_utils"


class CachesBefore:
    """The caches among the leaves of some arguments, as they are now."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._copies = {number: self._copied(leaf) for number, leaf in enumerate(leaves) if self.is_cache(leaf)}

    @staticmethod
    def is_cache(value: Any) -> bool:
        """Whether something is a cache of Hugging Face's, or one of its layers; asks without loading transformers."""
        kind: type = type(value)
        return _is_of_caches(kind)

    def without(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves without the caches."""
        return [None if number in self._copies else leaf for number, leaf in enumerate(leaves)]

    def back_in(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves with the caches as they were: copies, which may be written to."""
        again = CachesBefore([self._copies.get(number) for number in range(len(leaves))])
        return [again._copies.get(number, leaf) for number, leaf in enumerate(leaves)]

    def forget_unchanged(self) -> None:
        """After the call: let go of the tensors of layers that it has not written, if it has written any.

        Their shapes stay; a second pass that reads their values fails.
        """
        originals = [(original, _tensors(mine) != _tensors(original)) for original, mine in self._pairs]
        if any(is_written for _, is_written in originals):
            for (_, mine), (_, is_written) in zip(self._pairs, originals, strict=True):
                if not is_written:
                    vars(mine).update({name: _shape_of(value) for name, value in _tensor_items(mine)})
        self._pairs = []

    def _copied(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(item) for item in value)
        if isinstance(value, Tensor) or not self.is_cache(value):
            return value
        mine = object.__new__(type(value))  # copy.copy would take five times as long, for each layer in each block
        vars(mine).update({name: self._copied(item) for name, item in vars(value).items()})
        self._pairs.append((value, mine))
        return mine


@cache
def _is_of_caches(kind: type) -> bool:
    return any(base.__module__ == _MODULE for base in kind.__mro__)


def _tensor_items(value: Any) -> list[tuple[str, Tensor]]:
    return [(name, item) for name, item in vars(value).items() if isinstance(item, Tensor)]


def _tensors(value: Any) -> dict[str, int]:
    return {name: id(item) for name, item in _tensor_items(value)}


_SHAPES = WeakTensorKeyDictionary()  # each block asks for those of the layers of all blocks before it


def _shape_of(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory or values."""
    if tensor.is_meta or not tensor.numel():
        return tensor
    shape: Tensor | None = _SHAPES.get(tensor)  # type: ignore[no-untyped-call]
    if shape is None:
        shape = _SHAPES[tensor] = torch.empty(1, dtype=tensor.dtype, device="meta").expand(tensor.shape)
    return shape
