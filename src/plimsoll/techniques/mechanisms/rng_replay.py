"""The states of random number generators and of autocast, saved to repeat a computation exactly.

It covers torch's default generators on the host and on devices, and cuDNN's dropout in recurrent layers. Not handled:
the generators of Python and NumPy, and ``torch.Generator`` objects that the user creates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from plimsoll.device.cuda import cudnn_dropout


@dataclass(frozen=True)
class RandomNumbers:
    """States of torch's generators on the host and on some devices; ``host`` is ``None`` if nothing was saved."""

    host: Tensor | None
    devices: list[int]
    states: list[Tensor]
    dropouts: list[Tensor | None]  # cuDNN dropout states of the same devices

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> RandomNumbers:
        """Copy the current states of the generators on the host and on the devices of the tensors."""
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, [cudnn_dropout.copied_state(one) for one in devices])

    @classmethod
    def none(cls) -> RandomNumbers:
        """Return an empty snapshot, for code that uses no random numbers."""
        return cls(None, [], [], [])

    def restore(self) -> None:
        """Set the generators to the saved states."""
        if self.host is not None:
            torch.set_rng_state(self.host)
            set_device_states(self.devices, self.states)
            for device, dropout in zip(self.devices, self.dropouts, strict=True):
                if dropout is not None:
                    cudnn_dropout.put_back(device, dropout)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Set the generators to the saved states when the block ends."""
        try:
            yield
        finally:
            self.restore()


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one type of device."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Return the current state for the type of a device."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        """Return an autocast context with this state, but without a weight cache.

        Otherwise a weight that was cast without a graph might be reused in a computation with a graph.
        """
        return torch.autocast(self.device_type, self.dtype, self.is_enabled, cache_enabled=False)
