"""Detecting writes to existing tensors with a dispatch mode, and copying the storages before the first write.

The mode observes every torch operator in the block, including its backward passes. A storage that an operator in the
block returned is new. Any other storage that an operator writes existed before: a buffer, a frozen parameter, the
batch, a tensor in a closure. It is copied as a whole before the write, so that the block can be undone.

Not observed: writes that bypass torch's dispatcher (numpy, C extensions, kernels launched by hand). Operators whose
schema does not declare a write are not observed either, except BatchNorm's, which are listed here.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_TECHNIQUES = ("plimsoll.techniques.", "plimsoll.device.off_device", "plimsoll.device.mapped_memory")
"""Modules whose writes are ignored: they write private buffers that each pass initializes."""
_SKIPPED = ("torch.", "traceback", __name__)
_WRITTEN_IN_TRAINING = ("running_mean", "running_var")
"""Arguments that BatchNorm's kernels write but their schemas do not declare (torch 2.13, ``native_functions.yaml``)."""


class Write(NamedTuple):
    """A storage that was written, and its bytes before the write."""

    storage: torch.UntypedStorage
    content: Tensor


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records and copies the storages that existed before the block and are written in it.

    Args:
        copied: keys (`key_of`) of storages that are copied elsewhere; writes to them are not recorded.

    Attributes:
        written: maps the key (`key_of`) of each written storage to the storage and its earlier bytes.
    """

    def __init__(self, copied: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, Write] = {}
        self._seen: set[int] = set(copied)
        self._new: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions compiled; their writes are not observed, but their results do not change."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Copy the storages that ``func`` writes, then run it."""
        options = kwargs or {}
        for tensor in _written_by(func, args, options):
            self._note(tensor)
        result = func(*args, **options)
        if _makes_new(func):
            self._new.update(key_of(leaf) for leaf in tree_leaves(result) if has_storage(leaf))
        return result

    def _note(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key not in self._new and key not in self._seen:
            self._seen.add(key)
            caller = _caller()
            if caller is None or not _module_of(caller).startswith(_TECHNIQUES):
                storage = tensor.untyped_storage()
                self.written[key] = Write(storage, bytes_in(storage).clone())


def key_of(tensor: Tensor) -> int:
    """Return a key that distinguishes storages which exist at the same time."""
    return int(tensor.untyped_storage()._cdata)


def _caller() -> FrameType | None:
    """Return the innermost frame on the call stack whose code belongs neither to torch nor to this module."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return next((frame for frame in frames if not _module_of(frame).startswith(_SKIPPED)), None)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def has_storage(leaf: Any) -> bool:
    """Return whether a value is a tensor with a plain storage."""
    return (
        isinstance(leaf, Tensor)
        and leaf.layout == torch.strided
        and not (leaf.is_meta or leaf.is_nested)
        and not isinstance(leaf, FakeTensor)
        and not is_traceable_wrapper_subclass(leaf)
    )


@cache
def _makes_new(func: Any) -> bool:
    returns = func._schema.returns
    return func is torch.ops.aten.lift_fresh.default or any(one.alias_info is None for one in returns)


@cache
def _places_of_writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operator writes.

    BatchNorm's running statistics are always included, although BatchNorm writes them only if ``training`` is true.
    """
    return tuple(
        (place, one.name)
        for place, one in enumerate(func._schema.arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in _WRITTEN_IN_TRAINING
    )


def _written_by(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    for place, name in _places_of_writes(func):
        value = args[place] if place < len(args) else options.get(name)
        yield from (leaf for leaf in tree_leaves(value) if has_storage(leaf))


def bytes_in(owner: Any) -> Tensor:
    """Return a view of a whole storage as bytes; a tensor is returned unchanged."""
    if isinstance(owner, Tensor):
        return owner
    whole = torch.empty(0, dtype=torch.uint8, device=owner.device)
    return whole.set_(owner, 0, (owner.nbytes(),))  # type: ignore[call-overload,no-any-return]
