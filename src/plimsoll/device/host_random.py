"""The random number generators of the host: torch's on the CPU, Python's and numpy's global one.

Not covered: generators that the user made (`torch.Generator`, `numpy.random.Generator`), which belong to who made them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class HostRandomState(NamedTuple):
    """A copy of the state of every global generator of the host."""

    torch_cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any


def copy_host_state() -> HostRandomState:
    """Copy the state of the host's generators."""
    import numpy
    import torch

    return HostRandomState(torch.get_rng_state(), random.getstate(), numpy.random.get_state())


def restore_host_state(state: HostRandomState) -> None:
    """Put back what `copy_host_state` returned."""
    import numpy
    import torch

    torch.set_rng_state(state.torch_cpu)
    random.setstate(state.python)
    numpy.random.set_state(state.numpy)
