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
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()
_KEEPERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


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


@contextmanager
def states_outside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say that an optimizer's states leave the device as soon as they are made, so that no room is needed for all."""
    _KEEPERS.add(optimizer)
    try:
        yield
    finally:
        _KEEPERS.discard(optimizer)


def keeps_states_outside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `states_outside` was said of an optimizer."""
    return optimizer in _KEEPERS
