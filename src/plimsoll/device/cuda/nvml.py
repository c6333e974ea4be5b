"""What NVIDIA's driver knows of a device beyond this process: who else uses it, and the driver's version.

Source: the NVML reference, ``nvmlDeviceGetComputeRunningProcesses``. The driver lists processes by their number on the
host and gives no sizes under WSL and for some MIG devices: what it does not tell is ``None`` here, with the reason.
Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


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


class GpuUse(NamedTuple):
    """One GPU: its memory, and what each process has of it by its number, ``None`` where the driver does not tell."""

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    bytes_by_process: Mapping[int, int | None]


@contextmanager
def gpu_uses() -> Iterator[Callable[[], tuple[GpuUse, ...]]]:
    """Keep NVML open, which takes long to open, and yield what reads every GPU; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield tuple
        return
    try:
        handles = _handles()
        yield lambda: tuple(use for index, handle in enumerate(handles) if (use := _use_of(index, handle)) is not None)
    finally:
        pynvml.nvmlShutdown()


def _handles() -> list[Any]:
    import pynvml

    try:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _use_of(index: int, handle: Any) -> GpuUse | None:
    """Read a GPU; ``None`` where the driver refuses it (lost, being reset)."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return GpuUse(index, str(pynvml.nvmlDeviceGetName(handle)), memory.total, memory.used, by_process(entries))
    except pynvml.NVMLError:
        return None


def by_process(entries: Iterable[Any]) -> dict[int, int | None]:
    """Map processes to their bytes, from the ``nvmlProcessInfo_t`` of one device; MIG lists a process repeatedly."""
    found: dict[int, int | None] = {}
    for entry in entries:
        before = found.get(entry.pid, 0)
        known = before is not None and entry.usedGpuMemory is not None
        found[entry.pid] = before + entry.usedGpuMemory if known else None
    return found


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
