"""Batches on their way to the device: copied on a stream of their own while the device computes.

On CUDA a batch is copied to pinned memory, of which there is never more than for the batches on their way (the caller
keeps two: the current and the next), and from there without waiting. The tensors are made in the memory of the side
stream; the stream that uses them waits for the copy, and the allocator is told of the use, so that their memory is not
given to the next copy while it is still read (`torch.Tensor.record_stream`). On every other device a batch is moved
where it is asked for; on the CPU that is no copy. What is no tensor is passed on as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Moving(NamedTuple):
    """A batch that may still be on its way."""

    fields: dict[str, Any]
    arrival: torch.cuda.Event | None


class Transfer:
    """Moves batches to one device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.is_overlapped = self._device.type == "cuda"
        self._side: Any = torch.cuda.Stream(self._device) if self.is_overlapped else None  # type: ignore[no-untyped-call]

    def begin(self, fields: dict[str, Any]) -> Moving:
        """Start moving a batch."""
        if self._side is None:
            return Moving(_each(fields, lambda tensor: tensor.to(self._device)), None)
        with torch.cuda.stream(self._side):
            moved = _each(fields, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return Moving(moved, self._side.record_event())

    def finish(self, moving: Moving) -> dict[str, Any]:
        """Let the current stream wait until a batch has arrived, and return it."""
        if moving.arrival is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(moving.arrival)
            _each(moving.fields, lambda tensor: tensor.record_stream(current))
        return moving.fields


def _each(fields: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
