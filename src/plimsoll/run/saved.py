"""What a tensor, an array of numpy or a generator of random numbers held before a step, and how it is put back.

An iterator cannot be put back; whether it has moved can be told.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from plimsoll.run.written import bytes_in, has_storage

_MOST_ITERATORS, _MOST_PARTS = 8, 64  # in one another, and of a tuple


@dataclass(slots=True)
class SavedTensor:
    """The bytes of a whole storage, which views and ties share; of a tensor that has no plain one, its values."""

    owner: Any
    content: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, spare: Tensor | None = None, *, as_bytes: bool = True) -> SavedTensor:
        """Copy the whole storage ``as_bytes``, or the values only; into ``spare``, if that is as large."""
        owner = tensor.untyped_storage() if as_bytes and has_storage(tensor) else tensor
        whole = bytes_in(owner)
        if spare is None or spare.shape != whole.shape or spare.device != whole.device or spare.dtype != whole.dtype:
            spare = torch.empty_like(whole)
        return cls(owner, spare.copy_(whole))

    @property
    def key(self) -> int | None:
        """That of a storage, as `plimsoll.run.written.key_of` has it."""
        return int(self.owner._cdata) if isinstance(self.owner, torch.UntypedStorage) else None

    @property
    def value(self) -> Tensor:
        """What is there now."""
        return bytes_in(self.owner)

    def is_changed(self) -> bool:
        """Whether it holds something else now."""
        return self.value.shape != self.content.shape or not torch.equal(self.value, self.content)

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back, and its size."""
        if self.value.shape != self.content.shape:
            self.owner.resize_(self.content.nbytes)
        self.value.copy_(self.content)


@dataclass(slots=True)
class SavedArray:
    """The values of an array of numpy."""

    array: numpy.ndarray[Any, Any]
    content: numpy.ndarray[Any, Any]

    def is_changed(self) -> bool:
        """Whether it holds something else now."""
        return self.array.tobytes() != self.content.tobytes()

    def restore(self) -> None:
        """Put it back."""
        numpy.copyto(self.array, self.content)


@dataclass(slots=True)
class SavedPlace:
    """Which storage a tensor is in, and where: ``p.data = other``, ``set_`` and ``resize_`` change that."""

    tensor: Tensor
    before: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> SavedPlace:
        """Note it, which keeps the storage alive."""
        return cls(tensor, tensor.detach())

    def is_changed(self) -> bool:
        """Whether it is somewhere else now."""
        return place_of(self.tensor) != place_of(self.before)

    def restore(self) -> None:
        """Put it back."""
        if self.is_changed():
            self.tensor.data = self.before


@dataclass(slots=True)
class SavedGenerator:
    """The state of a generator of random numbers."""

    generator: Any
    state: Any

    @classmethod
    def of(cls, generator: Any) -> SavedGenerator:
        """Copy it."""
        if isinstance(generator, torch.Generator):
            return cls(generator, generator.get_state())
        if isinstance(generator, random.Random):
            return cls(generator, generator.getstate())
        if isinstance(generator, numpy.random.RandomState):
            return cls(generator, generator.get_state())
        return cls(generator, copy.deepcopy(generator.bit_generator.state))

    def restore(self) -> None:
        """Put it back."""
        if isinstance(self.generator, torch.Generator | numpy.random.RandomState):
            self.generator.set_state(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        else:
            self.generator.bit_generator.state = self.state


@dataclass(slots=True)
class SavedIterator:
    """Where an iterator is: what it refers to, the line of a generator and the items on its stack included."""

    name: str
    iterator: Iterator[Any]
    position: list[Any]

    @classmethod
    def of(cls, name: str, iterator: Iterator[Any]) -> SavedIterator:
        """Note it, without moving it."""
        return cls(name, iterator, _position_of(iterator))

    def has_moved(self) -> bool:
        """Whether it is somewhere else now."""
        now = _position_of(self.iterator)
        return len(now) != len(self.position) or not all(map(_is_equal, now, self.position))


def _position_of(value: Any, depth: int = _MOST_ITERATORS) -> list[Any]:
    if isinstance(value, tuple) and len(value) <= _MOST_PARTS:
        parts: Iterable[Any] = value
    elif not isinstance(value, Iterator) or not depth:
        return [len(value)] if isinstance(value, list | tuple) else [value]
    elif isinstance(value, GeneratorType):
        parts = (value.gi_frame and value.gi_frame.f_lasti, *gc.get_referents(value))
    elif hasattr(value, "__dict__"):
        parts = tuple(vars(value).values())
    else:
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of itertools
                parts = cast("tuple[Any, ...]", value.__reduce__())
        except TypeError:
            parts = gc.get_referents(value)
    itself = [value] if isinstance(value, Iterator) else []
    return itself + [one for part in parts for one in _position_of(part, depth - 1)]


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | range) and one == other)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where the values of a tensor are."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
