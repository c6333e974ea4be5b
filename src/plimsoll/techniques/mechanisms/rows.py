"""Rows of the arguments and results of a module call: selection, slicing and reassembly.

Rows are the entries of tensors along dimension 0 and the items of lists (such as texts). Arguments may be nested in
dicts, lists and tuples. The row count of a call is the count that most tensors have. Arguments with another count or
without rows (a table, a mask for all samples, a flag) are passed to every slice. A tensor with the same count by chance
is not detected here, but by `mechanisms.row_by_row`, which compares results.

Not handled: other objects, such as a key-value cache or a packed sequence. A call with such an argument is not split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from plimsoll.data.batch import leaves_of, map_leaves

_SINGLE = (bool, int, float, str, bytes, Enum, torch.dtype, torch.device, type(None))


class Arguments:
    """The arguments of a module call.

    Attributes:
        tensors: the tensors in the arguments, in order.
        num_rows: number of rows of the call; ``None`` if the call cannot be split.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        leaves = [leaf for value in (*args, *kwargs.values()) for _, leaf in leaves_of(value)]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.num_rows = None if any(map(_is_packed, (*args, *kwargs.values()))) else _rows_of(leaves)

    def of_rows(self, tensor: Tensor) -> bool:
        """Return whether a tensor has one entry per row."""
        return tensor.dim() > 0 and tensor.shape[0] == self.num_rows

    def with_tensors(self, tensors: Iterable[Tensor], pick: Callable[[list[Any]], Any]) -> tuple[Any, dict[str, Any]]:
        """Return positional and keyword arguments with other tensors, and with ``pick`` applied to lists of rows."""
        given = iter(tensors)

        def exchanged(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return next(given)
            if isinstance(leaf, list | tuple) and len(leaf) == self.num_rows:
                return type(leaf)(pick(list(leaf)))
            if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == self.num_rows:
                return np.asarray(pick(list(leaf)))
            return leaf

        args = tuple(map_leaves(value, exchanged) for value in self._args)
        return args, {name: map_leaves(value, exchanged) for name, value in self._kwargs.items()}

    def picked(self, numbers: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Return positional and keyword arguments with only these rows, in this order."""

        def of_tensor(tensor: Tensor) -> Tensor:
            index = torch.tensor(numbers, device=tensor.device)
            return tensor.detach().index_select(0, index) if self.of_rows(tensor) else tensor.detach()

        return self.with_tensors(map(of_tensor, self.tensors), lambda rows: [rows[number] for number in numbers])


def row_leaves(result: Any, num_rows: int) -> list[Tensor] | None:
    """Return a result's tensors if all have ``num_rows`` rows and its other leaves are single values, else ``None``."""
    leaves = [leaf for _, leaf in leaves_of(result)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = (leaf for leaf in leaves if not isinstance(leaf, Tensor))
    if not tensors or not all(_is_dense(tensor) and tensor.shape[:1] == (num_rows,) for tensor in tensors):
        return None
    return tensors if all(isinstance(leaf, _SINGLE) for leaf in others) else None


def single_values(result: Any) -> list[Any]:
    """Return the values of a result that are not tensors."""
    return [leaf for _, leaf in leaves_of(result) if not isinstance(leaf, Tensor)]


def with_rows(result: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a result with its tensors replaced, in order."""
    return map_leaves(result, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf)


def _rows_of(leaves: list[Any]) -> int | None:
    """Return the most frequent row count of tensors (the first in a tie) or, if there are no tensors, of lists."""
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, (*_SINGLE, list, tuple, np.ndarray)) for leaf in others):
        return None
    if not all(map(_is_dense, tensors)):
        return None
    counts = Counter(tensor.shape[0] for tensor in tensors if tensor.dim())
    counts = counts or Counter(len(leaf) for leaf in others if isinstance(leaf, list | tuple))
    return counts.most_common(1)[0][0] if counts else None


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)
