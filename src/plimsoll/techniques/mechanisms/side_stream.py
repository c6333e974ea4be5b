"""Copies between a CUDA device and the host on side streams, parallel to computation; synchronous on the CPU.

    side = SideStream(device)
    arrival = side.bring([(on_device, on_host), ...])   # starts the copies; the device continues to compute
    arrival.wait()                                      # work submitted from now on sees the copies

Copies in one direction run in the order of the calls. A copy starts after all work submitted to the device before it.
So its source or target may be a tensor that was just created.

Torch protects host memory: its cache of pinned blocks reuses a block only after the copies from and to the block. Call
`Transfer.synchronize` before you write to a tensor on the host, or read a tensor that was sent there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from plimsoll.memory.annotations import Copied, copying_beside

Pairs = Sequence[tuple[Tensor, Tensor]]
"""``(target, source)`` of each copy."""


class SideStream:
    """The streams for copies between the host and one device, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {to_device: _stream_of(device) for to_device in (True, False)}

    def bring(self, pairs: Pairs) -> Transfer:
        """Start to copy from the host to the device. Each pair is a target and its source."""
        return self._copy(pairs, to_device=True)

    def send(self, pairs: Pairs) -> Transfer:
        """Start to copy from the device to the host. Each pair is a target and its source."""
        return self._copy(pairs, to_device=False)

    @torch.no_grad()
    def _copy(self, pairs: Pairs, to_device: bool) -> Transfer:
        on_device = [target if to_device else source for target, source in pairs]
        stream = self._streams[to_device]
        if stream is None:
            with copying_beside(to_device) as copied:
                for target, source in pairs:
                    target.copy_(source)
            return Transfer(on_device, copied=copied)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return Transfer(on_device, stream.record_event())


class Transfer:
    """Copies in progress. If `wait` has not been called when the object is deleted, the device waits then.

    Device tensors are kept alive until the device has waited for the copies. So the next kernel cannot reuse their
    memory too early. Lifetimes depend on the order of calls only, so they are equal in a dry run on fake tensors. With
    ``record_stream`` they would depend on timing.
    """

    def __init__(
        self, on_device: list[Tensor], event: torch.cuda.Event | None = None, copied: Copied | None = None
    ) -> None:
        self._on_device, self._event, self._copied = on_device, event, copied
        self._is_waited_for = False

    def wait(self) -> None:
        """Make all later work of the device wait for the copies, and release the device tensors."""
        if self._is_waited_for:
            return
        self._is_waited_for = True
        if self._event is not None and self._on_device:
            torch.cuda.current_stream(self._on_device[0].device).wait_event(self._event)
        if self._copied is not None:
            self._copied.note_wait(by_processor=False)
        self._on_device.clear()

    def synchronize(self) -> None:
        """Block until the copies are complete, so that host code may read and write their tensors."""
        if self._event is not None:
            self._event.synchronize()
        if self._copied is not None:
            self._copied.note_wait(by_processor=True)

    def __del__(self) -> None:
        with suppress(AttributeError):  # torch may be unloaded when Python exits
            self.wait()


class Leaving:
    """The most recent transfers to the host. The device waits for older transfers, whose memory can then be reused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._transfers: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        """Add a transfer. If there are more than ``most``, make the device wait for the oldest one."""
        self._transfers.append(transfer)
        if len(self._transfers) > self._most:
            self._transfers.popleft().wait()

    def wait(self) -> None:
        """Make the device wait for all transfers."""
        while self._transfers:
            self._transfers.popleft().wait()


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
