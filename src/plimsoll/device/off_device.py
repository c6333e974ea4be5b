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
    """An object that keeps optimizer states outside the device, and lends copies on the device to each update."""

    def is_lent(self, parameter: torch.Tensor, state: torch.Tensor) -> bool:
        """Return whether a state of a parameter is outside the device, so that updates use a lent copy of it."""
        ...

    def copies_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start to copy tensors to the memory that holds the states, and return the copies.

        The copying ends before the next update begins.
        """
        ...

    def holding_back(self) -> AbstractContextManager[None]:
        """Let the updates in the ``with`` block change only the lent copies, not the states.

        Afterwards, `keep` writes the copies back to the states, or `drop` discards them.
        """
        ...

    def keep(self) -> None:
        """Write the updated values back to the optimizer states that are stored outside the device."""
        ...

    def drop(self) -> None:
        """Discard the updated copies, so that the optimizer states keep their old values."""
        ...


class _Keeper(NamedTuple):
    copy_of: Copier
    lender: Lender | None


_KEEPERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Keeper] = weakref.WeakKeyDictionary()


@contextmanager
def outside_the_device() -> Iterator[None]:
    """Count storages that first appear inside the ``with`` block as outside the device."""
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

    The mark is not needed for a real tensor, whose ``device`` shows where it is stored. It is needed for a fake tensor,
    and for a tensor in a test in which the CPU stands in for CUDA.
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
    """Declare that the states of an optimizer are moved outside the device as soon as they are created.

    So the device never holds all of them. The declaration holds inside the ``with`` block.

    Args:
        optimizer: the optimizer.
        copy_of: function that copies a tensor to the memory that holds the states. Large copies for undoing a step also
            belong there.
        lender: the object that lends copies of states to updates; ``None`` if updates change the states in place.
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
    """Return the function that copies a tensor to the memory that holds an optimizer's states.

    ``None`` if the states are on the device.
    """
    keeper = _KEEPERS.get(optimizer)
    return keeper.copy_of if keeper else None


def lender_of(optimizer: torch.optim.Optimizer) -> Lender | None:
    """Return the lender of an optimizer's states; ``None`` if updates change the states in place."""
    keeper = _KEEPERS.get(optimizer)
    return keeper.lender if keeper else None
