"""What every device backend offers, and the one way to get it.

One file per backend (`cpu`, `cuda`): what the machine has, what is used, how a limit is enforced, which errors mean
that memory ran out, how the allocator lets go of what it keeps. A backend holds no tensors and no state of a run.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any, Protocol

from plimsoll.errors import DeviceError
from plimsoll.records.device import Device, MemoryUse
from plimsoll.records.units import parse_bytes


class Backend(Protocol):
    """One kind of device. All sizes are bytes."""

    kind: str

    def probe(self) -> Device:
        """Describe the device as it really is for this process."""

    def use(self) -> MemoryUse:
        """Read what this process uses now and at its peak since the last `reset_peak`."""

    def baseline_bytes(self) -> int:
        """Count what a budget must hold before anything of a training is there; starts what the training will need."""

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""

    def limited(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Make the allocator raise where this process would go past ``budget_bytes``; undone on exit.

        Raises:
            BudgetError: if more than the budget is in use already, or the device has less.
        """

    def reserved(self, sizes: list[int]) -> AbstractContextManager[None] | None:
        """Allocate blocks of these sizes at once, free them, and keep them free for the work in the context.

        Raises the allocator's own error if it is not there. Returns ``None`` where it cannot be kept.
        """

    def without_holes(self) -> AbstractContextManager[None]:
        """Keep what is allocated in the context apart from other blocks, as far as the allocator can."""

    def release(self, last_resort: bool = False) -> None:
        """Give back what the allocator keeps of freed memory; as a last resort also in ways that cost time later."""

    def oom_family(self, error: BaseException) -> str | None:
        """Name the kind of out-of-memory error this is for this backend, or ``None`` if it is not one.

        The names are those of `plimsoll.device.oom_errors`.
        """

    def is_nearly_full(self) -> bool:
        """Whether so little is left that an unspecific library error is likely an out-of-memory error in disguise."""

    def random_state(self) -> dict[str, Any]:
        """Copy the state of the device's random number generators."""

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Put back a state that `random_state` returned."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""


def backend_for(device: str) -> Backend:
    """Return the backend of ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        DeviceError: if this machine or this build of torch has no such device.
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
    """Make allocations past ``budget`` raise on ``device`` while the block runs, instead of the process being killed.

    Code in Rust, such as that of ``tokenizers``, ends the process where it is refused memory: nothing can be raised
    there. It is printed where that was, why, and what to do; prepare texts before the block, or give it a larger limit.

    Args:
        budget: bytes, or a size such as ``"2GiB"``.
        device: ``"cpu"`` limits this process's private memory, ``"cuda"`` the caching allocator's share of that device.

    Raises:
        BudgetError: if more than that is in use already, or the device has less.
        DeviceError: if there is no such device.
    """
    return backend_for(device).limited(parse_bytes(budget))
