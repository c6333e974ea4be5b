"""Copies between a CUDA device and the host on a stream of their own, beside the computation; on the CPU at once."""

from __future__ import annotations

import torch
from torch import Tensor


class SideStream:
    """The copies to and from one device."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy after everything that was asked for so far; returns what to wait for, if anything."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
        return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let what is asked for from now on come after a copy."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
