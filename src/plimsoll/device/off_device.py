"""Memory that a training uses and that its budget does not count: what is made here lies outside the device.

    with outside_the_device():
        state = torch.empty(...)

For a training on CUDA that is memory of the host, for one on the CPU a file that is mapped. A trace counts such
storages apart (``on_host``) and not in the device's peak. In a run that nobody records it does nothing.

Covers what is made in the block by the thread that entered it; on the CPU autograd runs backward in the thread that
asked for it. Does NOT move anything: the caller makes the tensor where it says.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()
MARK = "_plimsoll_on_host"
"""The attribute of a tensor that lies outside the device."""
Copier = Callable[[torch.Tensor], torch.Tensor]


class Lender(Protocol):
    """Keeps an optimizer's states outside the device, and lends an update copies of them."""

    def is_lent(self, parameter: torch.Tensor, state: torch.Tensor) -> bool:
        """Whether a state of a parameter is outside, so that an update works on a copy of it."""
        ...

    def copies_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to where the states are; the copies are made before the next update begins."""
        ...

    def holding_back(self) -> AbstractContextManager[None]:
        """In the block updates leave the states outside as they are, until `keep` or `drop` is called."""
        ...

    def keep(self) -> None:
        """Copy what updates have made of the copies that were lent to where the states are."""
        ...

    def drop(self) -> None:
        """Forget what updates have made of them."""
        ...


class _Keeper(NamedTuple):
    copy_of: Copier
    lender: Lender | None


_KEEPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Keeper] = weakref.WeakKeyDictionary()


@contextmanager
def outside_the_device() -> Iterator[None]:
    """Let storages that are first seen in the block count as lying outside the device."""
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


def is_outside() -> bool:
    """Whether this thread is in such a block."""
    return _DEPTH.value > 0


def mark_outside(tensor: torch.Tensor) -> torch.Tensor:
    """Say that a tensor lies outside the device, and with it what is computed from such tensors alone.

    A live tensor says so by its own device; a fake one, and the CPU that stands in for CUDA in a test, cannot.
    """
    setattr(tensor, MARK, True)
    return tensor


def unmark(tensor: torch.Tensor) -> None:
    """Take that back."""
    vars(tensor).pop(MARK, None)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether `mark_outside` was said of a tensor."""
    return hasattr(tensor, MARK)


@contextmanager
def states_outside(optimizer: torch.optim.Optimizer, copy_of: Copier, lender: Lender | None = None) -> Iterator[None]:
    """Say that an optimizer's states leave the device as soon as they are made, so that it never has to hold all.

    ``copy_of`` copies a tensor to where they are, which is where large copies for an undo belong as well; ``lender`` is
    for states that an update cannot change where they are.
    """
    _KEEPERS[optimizer] = _Keeper(copy_of, lender)
    try:
        yield
    finally:
        _KEEPERS.pop(optimizer, None)  # which may be gone by then


def keeps_states_outside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `states_outside` was said of an optimizer."""
    return optimizer in _KEEPERS


def copier_of(optimizer: torch.optim.Optimizer) -> Copier | None:
    """Return what copies a tensor to where an optimizer's states are, ``None`` if they are on the device."""
    keeper = _KEEPERS.get(optimizer)
    return keeper.copy_of if keeper else None


def lender_of(optimizer: torch.optim.Optimizer) -> Lender | None:
    """Return what lends copies of an optimizer's states to its updates, ``None`` if these change the states."""
    keeper = _KEEPERS.get(optimizer)
    return keeper.lender if keeper else None
