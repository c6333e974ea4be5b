"""What a block writes of what was there before it: seen by a dispatch mode, and copied before the first write.

The mode sees every operator of torch that runs in the block, its backward passes included. A storage that an operator of
the block returned is new; any other that an operator writes was there before, whoever holds it: a buffer, a frozen
parameter, the batch, a tensor in a closure. It is copied as a whole just before, so that the block can be undone.

Does NOT see writes that pass torch's dispatcher by: numpy's, those of C extensions and of kernels that are launched by
hand, and operators whose schema does not say that they write (BatchNorm's, which is known here).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from plimsoll.run.reachable import is_of_library

_SKIPPED = ("torch", __name__)
_WRITTEN_IN_TRAINING = ("running_mean", "running_var")
"""Arguments of BatchNorm's kernels, which their schemas do not mark (``native_functions.yaml`` of torch 2.13)."""


class Write(NamedTuple):
    """A tensor through which a storage was first written, what the storage held before, and the user's line, if any."""

    tensor: Tensor
    held: Tensor
    line: str | None


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while it is in force, the tensors through which storages of before are written.

    Attributes:
        written: such a tensor of each storage, with the bytes that the storage held before the first write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, Write] = {}
        self._seen: set[int] = set()
        self._new: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Copy what ``func`` writes, then run it."""
        options = kwargs or {}
        for tensor in _written_by(func, args, options):
            self._note(tensor)
        result = func(*args, **options)
        if _makes_new(func):
            self._new.update(key_of(leaf) for leaf in tree_leaves(result) if _has_storage(leaf))
        return result

    def _note(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key not in self._new and key not in self._seen:
            self._seen.add(key)
            self.written[key] = Write(tensor, bytes_of(tensor).clone(), _line_of_user())


def key_of(tensor: Tensor) -> int:
    """Tell storages apart that exist at the same time."""
    return int(tensor.untyped_storage()._cdata)


def _line_of_user() -> str | None:
    """The line that called torch, unless a library did."""
    frame = sys._getframe(1)
    while frame is not None and (is_of_library(name := frame.f_globals.get("__name__")) and name.startswith(_SKIPPED)):
        frame = frame.f_back
    if frame is None or is_of_library(frame.f_globals.get("__name__")):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not is_traceable_wrapper_subclass(leaf)


@cache
def _makes_new(func: Any) -> bool:
    returns = func._schema.returns
    return func is torch.ops.aten.lift_fresh.default or any(one.alias_info is None for one in returns)


@cache
def _places_of_writes(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes, by place and name; ``training`` decides about some of them."""
    return tuple(
        (place, one.name)
        for place, one in enumerate(func._schema.arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in _WRITTEN_IN_TRAINING
    )


def _written_by(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    for place, name in _places_of_writes(func):
        value = args[place] if place < len(args) else options.get(name)
        yield from (leaf for leaf in tree_leaves(value) if _has_storage(leaf))


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes; of one that has no plain storage the tensor itself, detached."""
    if isinstance(tensor, FakeTensor) or not _has_storage(tensor):
        return tensor.detach()
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]
