"""What a block writes of what was there before it: seen by a dispatch mode, and copied before the first write.

The mode sees every operator of torch that runs in the block, its backward passes included. A storage that an operator
of the block returned is new; any other that an operator writes was there before, whoever holds it: a buffer, a frozen
parameter, the batch, a tensor in a closure. It is copied as a whole just before, so that the block can be undone.

Does NOT see writes that pass torch's dispatcher by: numpy's, those of C extensions and of kernels that are launched by
hand, and operators whose schema does not say that they write (BatchNorm's, which is known here).
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
"""What these write is memory of their own, with which a pass begins anew."""
_SKIPPED = ("torch.", "traceback", __name__)
_WRITTEN_IN_TRAINING = ("running_mean", "running_var")
"""Arguments of BatchNorm's kernels, which their schemas do not mark (``native_functions.yaml`` of torch 2.13)."""


class Write(NamedTuple):
    """A storage that was written, and its bytes before that."""

    storage: torch.UntypedStorage
    content: Tensor


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while it is in force, the tensors through which storages of before are written.

    Args:
        copied: storages, by their `key_of`, that somebody has copied: their writes are not noted.

    Attributes:
        written: each such storage, by its `key_of`.
    """

    def __init__(self, copied: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, Write] = {}
        self._seen: set[int] = set(copied)
        self._new: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as compiled: what they write is not seen, but they compute the same as without."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Copy what ``func`` writes, then run it."""
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
    """Tell storages apart that exist at the same time."""
    return int(tensor.untyped_storage()._cdata)


def _caller() -> FrameType | None:
    """What called torch."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return next((frame for frame in frames if not _module_of(frame).startswith(_SKIPPED)), None)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def has_storage(leaf: Any) -> bool:
    """Whether a value is a tensor with a plain storage of its own."""
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
    """The arguments that an operator writes, by place and name; ``training`` decides about some of them."""
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
    """The whole of a storage as bytes; a tensor as it is."""
    if isinstance(owner, Tensor):
        return owner
    whole = torch.empty(0, dtype=torch.uint8, device=owner.device)
    return whole.set_(owner, 0, (owner.nbytes(),))  # type: ignore[call-overload,no-any-return]
