"""The interface of a device backend, and `backend_for`, which returns the backend of a device.

A backend (`cpu`, `cuda`) describes the device, measures memory use and enforces a limit. It also recognizes
out-of-memory errors and makes the allocator release cached memory. It holds no tensors, and no data of a training run.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, Protocol

from plimsoll.errors import DeviceError
from plimsoll.records.device import Device, MemoryUse
from plimsoll.records.units import parse_bytes


class Backend(Protocol):
    """One kind of device. All sizes are in bytes."""

    kind: str

    def probe(self) -> Device:
        """Describe the device as this process sees it, including limits on its memory."""

    def use(self) -> MemoryUse:
        """Return the memory use of this process, now and at its peak since the last `reset_peak`."""

    def baseline_bytes(self) -> int:
        """Return the bytes that count against a budget before training allocates memory.

        This starts thread pools or creates the CUDA context, because training needs them and their memory counts.
        """

    def reset_peak(self) -> None:
        """Set the peak to the current memory use."""

    def limited(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Make the allocator raise if this process would exceed ``budget_bytes`` inside the ``with`` block.

        Raises:
            BudgetError: if more than the budget is already in use, or the device has less memory than the budget.
        """

    def reserved(self, sizes: list[int]) -> AbstractContextManager[None] | None:
        """Check that allocations of these sizes fit together, and keep that memory free inside the ``with`` block.

        The memory is allocated as a test and freed immediately. If it does not fit, the allocator's error is raised.

        Returns:
            A context manager for the block, or ``None`` if this backend cannot keep the memory free.
        """

    def without_holes(self) -> AbstractContextManager[None]:
        """Place allocations inside the ``with`` block apart from other allocations, as far as the allocator can.

        Freeing them then leaves no holes between other allocations.
        """

    def release(self, last_resort: bool = False) -> None:
        """Release cached memory. With ``last_resort``, also take measures that slow down later steps."""

    def oom_family(self, error: BaseException) -> str | None:
        """Return the family of an out-of-memory error, or ``None`` for any other error.

        `plimsoll.device.oom_errors` lists the families.
        """

    def is_nearly_full(self) -> bool:
        """Return whether free memory is so low that an unspecific library error probably means out of memory."""

    def random_state(self) -> dict[str, Any]:
        """Return a copy of the state of the device's random number generators."""

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `random_state` returned."""

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""


def backend_for(device: str) -> Backend:
    """Return the backend of ``"cpu"``, ``"cuda"`` or a numbered device such as ``"cuda:1"``.

    Raises:
        DeviceError: if the machine or this build of torch has no such device.
    """
    from plimsoll.device.cpu.backend import CpuBackend
    from plimsoll.device.cuda.backend import CudaBackend

    if device == "cpu":
        return CpuBackend()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise DeviceError(f"there is no device {device!r}: give cpu, cuda, or cuda and a number such as cuda:1")
    return CudaBackend(int(match[1] or 0))


def limited(budget: str | int, device: str = "cpu") -> AbstractContextManager[None]:
    """Make allocations beyond ``budget`` raise while the block runs, before the process is killed.

    Rust code, such as ``tokenizers``, aborts the process if an allocation fails, and Python cannot raise an exception.
    Plimsoll then prints the line that called it, the reason and a remedy. To avoid this, prepare texts before the block
    or set a larger limit.

    Args:
        budget: bytes, or a size such as ``"2GiB"``.
        device: ``"cpu"`` limits private memory of this process; ``"cuda"`` limits torch's caching allocator.

    Raises:
        BudgetError: if more than the budget is already in use, or the device has less memory than the budget.
        DeviceError: if there is no such device.
    """
    return backend_for(device).limited(parse_bytes(budget))
