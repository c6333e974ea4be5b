"""The test whether blocks of a model are alike: they behave equally, and differ only in their number in the model.

Compared are the classes of their modules, all attributes, and the layouts of parameters and buffers. An attribute that
is neither a number nor a string must be the same object. So a block with its own hook differs from the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.techniques.mechanisms.blocks import blocks_of

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.Size)
"""Types whose values are compared by equality."""

_FEWEST = 3  # alike blocks in a row
_PARTS = frozenset({"_parameters", "_buffers", "_modules"})


def rows_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield rows of three or more consecutive blocks of a model that are alike and share no parameter."""
    waiting = [(name.rpartition("."), block) for name, block in blocks_of(model)]
    while waiting:
        (path, _, number), first = waiting[0]
        row = [first]
        for (other_path, _, other_number), block in waiting[1:] if number.isdecimal() else ():
            is_next = other_path == path and other_number == str(int(number) + len(row))
            if not is_next or not are_alike(first, int(number), block, int(other_number)):
                break
            row.append(block)
        waiting = waiting[len(row) :]
        parameters = [one for block in row for one in block.parameters()]
        if len(row) >= _FEWEST and len(parameters) == len(set(parameters)):
            yield row


def are_alike(first: nn.Module, first_number: int, other: nn.Module, other_number: int) -> bool:
    """Return whether two blocks are alike; their numbers in the model may differ."""
    some, others = [*_traits(first)], [*_traits(other)]
    own = (int, first_number), (int, other_number)
    return len(some) == len(others) and all(
        one == another or (one[:-2] == another[:-2] and (one[-2:], another[-2:]) == own)
        for one, another in zip(some, others, strict=True)
    )


def layout_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same class, shape, strides, dtype and ``requires_grad``."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _traits(block: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield the traits that determine the behavior of a block: each with its name first, its type and value last."""
    for name, module in block.named_modules():
        yield name, "class", type(module)
        for key, value in vars(module).items():
            if key not in _PARTS:
                is_ours = key == "forward" and type(value).__module__.startswith("plimsoll.")
                yield name, key, type(value), None if is_ours else _identity(value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield name, key, type(tensor), None if tensor is None else layout_of(tensor)


def _identity(value: Any) -> Hashable:
    """Return a key that is equal for values with the same behavior."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple((key, _identity(one)) for key, one in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(_identity, value))
    if type(value) is partial:
        return partial, id(value.func), _identity(value.args), _identity(value.keywords)
    return "object", id(value)
