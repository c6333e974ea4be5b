"""What a computation that is done a second time needs, to be the first one again: random numbers and autocast.

Covers torch's generators on the host and on devices, and cuDNN's dropout of recurrent layers. Does NOT cover generators
of one's own, Python's and numpy's.
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
    """The states of torch's generators on the host and on some devices; ``host`` is ``None`` if nothing draws."""

    host: Tensor | None
    devices: list[int]
    states: list[Tensor]
    dropouts: list[Tensor | None]  # of recurrent layers, on the same devices

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> RandomNumbers:
        """Copy them; the devices are those of some tensors."""
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, [cudnn_dropout.copied_state(one) for one in devices])

    @classmethod
    def none(cls) -> RandomNumbers:
        """For what draws nothing."""
        return cls(None, [], [], [])

    def restore(self) -> None:
        """Put them back."""
        if self.host is not None:
            torch.set_rng_state(self.host)
            set_device_states(self.devices, self.states)
            for device, dropout in zip(self.devices, self.dropouts, strict=True):
                if dropout is not None:
                    cudnn_dropout.put_back(device, dropout)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back when the block ends."""
        try:
            yield
        finally:
            self.restore()


@dataclass(frozen=True)
class Autocast:
    """What autocast is for a type of device."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """What it is now."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        """Return the context that makes it so. A weight that was cast without a graph must not be used with one."""
        return torch.autocast(self.device_type, self.dtype, self.is_enabled, cache_enabled=False)
