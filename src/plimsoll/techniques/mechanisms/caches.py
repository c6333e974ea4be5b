"""Snapshots of the key-value caches among the arguments of a call that will be repeated.

A Hugging Face model fills its cache in training, because ``use_cache`` is on by default. The repeated call of a block
must see the cache in its first state, and must not change the caller's cache again. So the structure of the cache is
copied, but its tensors are shared. A block writes one layer of the cache. Of the other layers' tensors, only the shapes
are kept.

Not handled: caches that are written in place (``StaticCache``), which no training uses.
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
    """Copies of the Hugging Face caches among a call's arguments, made when the object is created before the call.

    ``leaves``: the arguments of the call, with nested dicts, lists and tuples flattened.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._copies = {number: self._copied(leaf) for number, leaf in enumerate(leaves) if self.is_cache(leaf)}

    @staticmethod
    def is_cache(value: Any) -> bool:
        """Return whether a value is a Hugging Face cache or a layer of one, without importing transformers."""
        kind: type = type(value)
        return _is_of_caches(kind)

    def without(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves, with ``None`` in place of caches."""
        return [None if number in self._copies else leaf for number, leaf in enumerate(leaves)]

    def back_in(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves with new copies of the original caches, which the repeated call may modify."""
        again = CachesBefore([self._copies.get(number) for number in range(len(leaves))])
        return [again._copies.get(number, leaf) for number, leaf in enumerate(leaves)]

    def forget_unchanged(self) -> None:
        """Release the tensors of the cache layers that the call did not write, if it wrote any layer.

        Use this method after the call.

        The shapes remain. If the repeated call reads the values of such a tensor, it fails.
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
        mine = object.__new__(type(value))  # copy.copy takes five times as long, for each layer in each block
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


_SHAPES = WeakTensorKeyDictionary()  # each block needs the shapes of the layers of all previous blocks


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on the meta device, without values."""
    if tensor.is_meta or not tensor.numel():
        return tensor
    shape: Tensor | None = _SHAPES.get(tensor)  # type: ignore[no-untyped-call]
    if shape is None:
        shape = _SHAPES[tensor] = torch.empty(1, dtype=tensor.dtype, device="meta").expand(tensor.shape)
    return shape
