"""Saved copies of tensors, numpy arrays and random number generators, with methods to restore them.

The position of an iterator cannot be restored, but it is detected whether the iterator has advanced.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, Protocol, cast

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from plimsoll.step.undo.written import bytes_in, has_storage

_MOST_DEPTH, _MOST_ITEMS = 10, 1000
_PLAIN = (int, float, complex, str, bytes)
_OF_PROGRAMS = (CodeType, FunctionType, BuiltinFunctionType, ModuleType, type, DataLoader, Dataset)
"""Objects that iterators refer to but do not iterate over. The state of a function is searched separately."""


class Stateful(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``, as checkpoints of torch and accelerate expect."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


@dataclass(slots=True)
class SavedTensor:
    """The bytes of a whole storage, which views and tied tensors share.

    For a tensor without a plain storage, a copy of the tensor is saved instead.
    """

    owner: Any
    content: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, into: Tensor | None = None, *, as_bytes: bool = True) -> SavedTensor:
        """Copy a tensor.

        Args:
            tensor: the tensor.
            into: memory to reuse if its shape, dtype and device match.
            as_bytes: whether to copy the bytes of the whole storage, not only the elements of the tensor.
        """
        owner = tensor.untyped_storage() if as_bytes and has_storage(tensor) else tensor
        whole = bytes_in(owner)
        if not has_storage(tensor):
            return cls(owner, whole.clone())
        if into is None or into.shape != whole.shape or into.device != whole.device or into.dtype != whole.dtype:
            into = torch.empty_like(whole)
        return cls(owner, into.copy_(whole))

    @property
    def key(self) -> int | None:
        """The key of the storage (see `written.key_of`); ``None`` for a tensor without a plain storage."""
        return int(self.owner._cdata) if isinstance(self.owner, torch.UntypedStorage) else None

    @property
    def value(self) -> Tensor:
        """The current content."""
        return bytes_in(self.owner)

    def is_changed(self) -> bool:
        """Return whether the content differs from the saved one."""
        if self.value.layout != torch.strided:  # some other layouts cannot be compared
            return not torch.equal(self.value.to_dense(), self.content.to_dense())
        return self.value.shape != self.content.shape or not torch.equal(self.value, self.content)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the content, and the size of the storage."""
        if self.value.shape != self.content.shape:
            self.owner.resize_(self.content.nbytes)
        self.value.copy_(self.content)


@dataclass(slots=True)
class SavedArray:
    """The values of a numpy array."""

    array: numpy.ndarray[Any, Any]
    content: numpy.ndarray[Any, Any]

    def is_changed(self) -> bool:
        """Return whether the values differ from the saved ones."""
        return self.array.tobytes() != self.content.tobytes()

    def restore(self) -> None:
        """Restore the values."""
        numpy.copyto(self.array, self.content)


@dataclass(slots=True)
class SavedPlace:
    """The storage and offset of a tensor, which ``p.data = other``, ``set_`` and ``resize_`` change."""

    tensor: Tensor
    before: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> SavedPlace:
        """Save the storage of a tensor and keep it alive."""
        return cls(tensor, tensor.detach())

    def is_changed(self) -> bool:
        """Return whether the tensor refers to other memory now."""
        return place_of(self.tensor) != place_of(self.before)

    def restore(self) -> None:
        """Restore the storage of the tensor."""
        if self.is_changed():
            self.tensor.data = self.before


@dataclass(slots=True)
class SavedGenerator:
    """The state of a random number generator."""

    generator: Any
    state: Any

    @classmethod
    def of(cls, generator: Any) -> SavedGenerator:
        """Copy the state of a generator."""
        if isinstance(generator, torch.Generator):
            return cls(generator, generator.get_state())
        if isinstance(generator, random.Random):
            return cls(generator, generator.getstate())
        if isinstance(generator, numpy.random.RandomState):
            return cls(generator, generator.get_state())
        return cls(generator, copy.deepcopy(generator.bit_generator.state))

    def is_changed(self) -> bool:
        """Return whether the state differs from the saved one."""
        return not is_same_state(SavedGenerator.of(self.generator).state, self.state)

    def restore(self) -> None:
        """Restore the state."""
        if isinstance(self.generator, torch.Generator | numpy.random.RandomState):
            self.generator.set_state(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        else:
            self.generator.bit_generator.state = self.state


@dataclass(slots=True)
class SavedIterator:
    """An iterator and its ``position`` when it was saved; ``None`` if the position cannot be determined."""

    name: str
    iterator: Iterator[Any]
    position: list[Any] | None

    @classmethod
    def of(cls, name: str, iterator: Iterator[Any]) -> SavedIterator:
        """Record the position without advancing the iterator."""
        return cls(name, iterator, _position_of(iterator))

    def has_moved(self) -> bool:
        """Return whether the iterator has advanced or may have."""
        now = _position_of(self.iterator)
        if now is None or self.position is None or len(now) != len(self.position):
            return True
        return not all(map(_is_equal, now, self.position))


def _position_of(iterator: Iterator[Any]) -> list[Any] | None:
    with suppress(_CannotTellError):
        return [*_parts_of(iterator, 0)]
    return None


class _CannotTellError(Exception):
    pass


def _parts_of(value: Any, depth: int) -> Iterator[Any]:
    """Yield parts of ``value`` that differ if an iterator advances: counts, instruction offsets, referenced objects.

    Raises:
        _CannotTellError: if ``value`` has a part of an unknown type, or is nested too deeply.
    """
    if depth > _MOST_DEPTH:
        raise _CannotTellError
    if value is None or isinstance(value, (*_PLAIN, range, *_OF_PROGRAMS)):
        yield value
        return
    parts: Iterable[Any]
    if isinstance(value, GeneratorType):
        yield value.gi_frame and value.gi_frame.f_lasti
        found = gc.get_referents(value)  # includes its stack, and its frame if it was accessed
        parts = [part for part in found if not isinstance(part, FrameType)]
        yield from (part for part in parts if isinstance(part, Iterator))  # a new iterator may have replaced an old one
    elif isinstance(value, _BaseDataLoaderIter):
        parts = (value._num_yielded,)
    elif type(value).__module__ in {"builtins", "itertools"} and isinstance(value, Iterator):
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # raised by itertools
                parts = cast("tuple[Any, ...]", value.__reduce__())
        except TypeError:  # unsupported in some Python versions
            parts = gc.get_referents(value)
    elif type(value) in {list, tuple, dict, set, frozenset}:
        if len(value) > _MOST_ITEMS:  # data, not state
            yield from (value, len(value))
            return
        parts = (type(value).__name__, len(value), *(value.items() if isinstance(value, dict) else value))
    else:
        raise _CannotTellError(type(value))
    for part in parts:
        yield from _parts_of(part, depth + 1)


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (*_PLAIN, range)) and bool(one == other))


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the address, shape, strides and dtype of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def is_same_state(state: Any, other: Any) -> bool:
    """Return whether two random states, or two results of ``state_dict``, are equal."""
    if type(state) is not type(other):
        return False
    if isinstance(state, Tensor):
        return state.dtype == other.dtype and torch.equal(state, other)
    if isinstance(state, numpy.ndarray):
        return state.dtype == other.dtype and numpy.array_equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(is_same_state(value, other[name]) for name, value in state.items())
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(is_same_state, state, other))
    return state is other or (isinstance(state, _PLAIN) and state == other)
