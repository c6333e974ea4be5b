"""Copies between a CUDA device and the host on streams of their own, beside the computation; on the CPU at once.

    side = SideStream(device)
    arrival = side.bring([(on_device, on_host), ...])   # asked for; the device goes on computing
    arrival.wait()                                      # what is asked for from now on sees the copies

Copies of one direction are made in the order in which they are asked for. A copy begins when everything that was asked
of the device before it is done, so that a tensor just made can be its source or its target.

Memory on the host is torch's to protect: its cache of pinned blocks waits for the copies of a block before it gives it
away again. Who writes to a tensor on the host, or reads what was sent there, calls `Transfer.synchronize` before.
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
    """The copies to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {to_device: _stream_of(device) for to_device in (True, False)}

    def bring(self, pairs: Pairs) -> Transfer:
        """Copy from the host to the device."""
        return self._copy(pairs, to_device=True)

    def send(self, pairs: Pairs) -> Transfer:
        """Copy from the device to the host."""
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
    """Copies in progress. One that nobody waits for is waited for when it is dropped.

    It keeps the tensors on the device until the device has waited for it: their memory goes to the next kernel no
    earlier than the copy has ended. How long they are kept follows from the order of calls alone, the same in a dry run
    on fake tensors (``record_stream`` would free by the clock).
    """

    def __init__(
        self, on_device: list[Tensor], event: torch.cuda.Event | None = None, copied: Copied | None = None
    ) -> None:
        self._on_device, self._event, self._copied = on_device, event, copied
        self._is_waited_for = False

    def wait(self) -> None:
        """Let what is asked of the device from now on come after the copies, and let go of the tensors there."""
        if self._is_waited_for:
            return
        self._is_waited_for = True
        if self._event is not None and self._on_device:
            torch.cuda.current_stream(self._on_device[0].device).wait_event(self._event)
        if self._copied is not None:
            self._copied.note_wait(by_processor=False)
        self._on_device.clear()

    def synchronize(self) -> None:
        """Wait until the copies have been made: the processor may read and write what they are of."""
        if self._event is not None:
            self._event.synchronize()
        if self._copied is not None:
            self._copied.note_wait(by_processor=True)

    def __del__(self) -> None:
        with suppress(AttributeError):  # torch may be gone when Python ends
            self.wait()


class Leaving:
    """The last few transfers to the host: the device waits for all older ones, whose memory is then free again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._transfers: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        """Take one more."""
        self._transfers.append(transfer)
        if len(self._transfers) > self._most:
            self._transfers.popleft().wait()

    def wait(self) -> None:
        """Wait for all."""
        while self._transfers:
            self._transfers.popleft().wait()


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
