"""Marks for storages that training keeps outside the device, so that the budget does not count them.

    with outside_the_device():
        state = torch.empty(...)

For training on CUDA this is host memory; for training on the CPU it is a memory-mapped file. A trace counts such
storages separately (``on_host``), not in the device peak. Without a trace, the block has no effect.

A block applies to the thread that entered it. On the CPU, autograd runs backward in the thread that called it. Does NOT
move tensors: the caller creates the tensor in host memory or in a file.
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
"""The attribute that marks a tensor as outside the device."""
Copier = Callable[[torch.Tensor], torch.Tensor]


class Lender(Protocol):
    """An object that keeps optimizer states outside the device, and lends copies to each update."""

    def is_lent(self, parameter: torch.Tensor, state: torch.Tensor) -> bool:
        """Return whether a parameter's state is outside the device, so that updates use a lent copy of it."""
        ...

    def copies_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the memory that holds the states, before the next update begins."""
        ...

    def holding_back(self) -> AbstractContextManager[None]:
        """Let updates in the block change only the lent copies; `keep` or `drop` then decides about the states."""
        ...

    def keep(self) -> None:
        """Copy the updated copies back into the states outside the device."""
        ...

    def drop(self) -> None:
        """Discard the updated copies."""
        ...


class _Keeper(NamedTuple):
    copy_of: Copier
    lender: Lender | None


_KEEPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Keeper] = weakref.WeakKeyDictionary()


@contextmanager
def outside_the_device() -> Iterator[None]:
    """Count storages that first appear in the block as outside the device."""
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


def is_outside() -> bool:
    """Return whether this thread is inside an `outside_the_device` block."""
    return _DEPTH.value > 0


def mark_outside(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as outside the device. Tensors computed only from marked tensors then count as outside, too.

    The device of a real tensor already shows its memory. A fake tensor needs the mark, and so does a tensor in a test
    in which the CPU stands in for CUDA.
    """
    setattr(tensor, MARK, True)
    return tensor


def unmark(tensor: torch.Tensor) -> None:
    """Remove the mark of `mark_outside`."""
    vars(tensor).pop(MARK, None)


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was marked by `mark_outside`."""
    return hasattr(tensor, MARK)


@contextmanager
def states_outside(optimizer: torch.optim.Optimizer, copy_of: Copier, lender: Lender | None = None) -> Iterator[None]:
    """Declare that an optimizer's states leave the device once they are created, so the device never holds them all.

    Args:
        optimizer: the optimizer.
        copy_of: copies a tensor to the memory that holds the states; large copies for undoing a step belong there as
            well.
        lender: lends copies of states to updates; ``None`` if updates change the states in place.
    """
    _KEEPERS[optimizer] = _Keeper(copy_of, lender)
    try:
        yield
    finally:
        _KEEPERS.pop(optimizer, None)


def keeps_states_outside(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's states are outside the device (see `states_outside`)."""
    return optimizer in _KEEPERS


def copier_of(optimizer: torch.optim.Optimizer) -> Copier | None:
    """Return the function that copies tensors to the memory of an optimizer's states; ``None`` if it is the device."""
    keeper = _KEEPERS.get(optimizer)
    return keeper.copy_of if keeper else None


def lender_of(optimizer: torch.optim.Optimizer) -> Lender | None:
    """Return the lender of an optimizer's states, or ``None`` if updates change the states directly."""
    keeper = _KEEPERS.get(optimizer)
    return keeper.lender if keeper else None
