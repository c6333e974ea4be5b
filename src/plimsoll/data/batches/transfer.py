"""Transfer of batches to the device, on a separate CUDA stream during computation.

On CUDA, a batch is copied to pinned memory, and from there asynchronously. Pinned memory is used only by batches in
transfer (the caller keeps two: the current and the next). The tensors are allocated on the side stream, and the stream
that uses them waits for the copy. `torch.Tensor.record_stream` tells the allocator about the use, so that it does not
reuse their memory too early. On other devices, a batch is moved when it is requested; on the CPU, this copies nothing.
Values that are not tensors are passed through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Moving(NamedTuple):
    """A batch in transfer. ``arrival`` is the CUDA event at the end of the transfer; ``None``: no wait is needed."""

    fields: dict[str, Any]
    arrival: torch.cuda.Event | None


class Transfer:
    """The transfer of batches to one device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.is_overlapped = self._device.type == "cuda"
        self._side: Any = torch.cuda.Stream(self._device) if self.is_overlapped else None  # type: ignore[no-untyped-call]

    def begin(self, fields: dict[str, Any]) -> Moving:
        """Start the transfer of a batch."""
        if self._side is None:
            return Moving(_each(fields, lambda tensor: tensor.to(self._device)), None)
        with torch.cuda.stream(self._side):
            moved = _each(fields, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return Moving(moved, self._side.record_event())

    def finish(self, moving: Moving) -> dict[str, Any]:
        """Make the current stream wait until a batch has arrived, and return the batch."""
        if moving.arrival is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(moving.arrival)
            _each(moving.fields, lambda tensor: tensor.record_stream(current))
        return moving.fields


def _each(fields: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
