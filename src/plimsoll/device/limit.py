"""The limit by itself, for people with a loop of their own: ``with plimsoll.limited("2GiB"): ...``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from plimsoll.device.base import backend_for
from plimsoll.records.units import parse_bytes


def limited(budget: str | int, device: str = "cpu") -> AbstractContextManager[None]:
    """Make allocations past ``budget`` raise on ``device`` while the block runs, instead of the process being killed.

    Code in Rust, such as that of ``tokenizers``, ends the process where it is refused memory: nothing can be raised
    there. It is printed where that was, why, and what to do; prepare texts before the block, or give it room.

    Args:
        budget: bytes, or a size such as ``"2GiB"``.
        device: ``"cpu"`` limits this process's private memory, ``"cuda"`` the caching allocator's share of that device.

    Raises:
        BudgetError: if more than that is in use already, or the device has less.
        DeviceError: if there is no such device.
    """
    return backend_for(device).limited(parse_bytes(budget))
