"""What NVIDIA's driver knows of a device beyond this process: who else uses it, and the driver's version.

Source: the NVML reference, ``nvmlDeviceGetComputeRunningProcesses``. The driver lists processes by their number on the
host and gives no sizes under WSL and for some MIG devices: what it does not tell is ``None`` here, with the reason.
Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class DriverView(NamedTuple):
    """What the driver says of one device, in bytes; ``note`` says why a value is ``None``."""

    own_bytes: int | None = None
    others_bytes: int | None = None
    note: str | None = None


def driver_version() -> str | None:
    """Return the driver's version, ``None`` where NVML cannot be used."""
    import pynvml

    try:
        with _session():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def driver_view(uuid: str) -> DriverView:
    """Ask the driver who uses the device with this UUID ("GPU-...")."""
    import pynvml

    try:
        with _session():
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return split_use({entry.pid: entry.usedGpuMemory for entry in entries}, os.getpid())
    except pynvml.NVMLError as error:
        return DriverView(note=f"NVML does not describe {uuid} ({error}): what other processes use is unknown")


def split_use(bytes_by_process: Mapping[int, int | None], own: int) -> DriverView:
    """Part this process, by its number, from the others, where the driver tells both."""
    known = [num_bytes for num_bytes in bytes_by_process.values() if num_bytes is not None]
    if len(known) < len(bytes_by_process):
        return DriverView(note="the driver gives no sizes per process here (WSL, MIG): other processes' use is unknown")
    own_bytes = bytes_by_process.get(own)
    if own_bytes is None:
        return DriverView(
            note="the driver knows this process by another number (a container) or not yet: its part is unknown"
        )
    return DriverView(own_bytes, sum(known) - own_bytes)


@contextmanager
def _session() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
