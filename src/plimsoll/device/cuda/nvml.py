"""Facts about GPUs from NVIDIA's driver: memory use by process, and the driver's version.

The driver lists processes by their id on the host. It reports no sizes under WSL and for some MIG devices. Unknown
sizes are ``None``, with the reason in a note. Needs no torch.

Source: the NVML reference, ``nvmlDeviceGetComputeRunningProcesses``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple


class DriverView(NamedTuple):
    """Memory use of one device in bytes: of this process, and of all others. ``note`` explains a ``None``."""

    own_bytes: int | None = None
    others_bytes: int | None = None
    note: str | None = None


def driver_version() -> str | None:
    """Return the driver's version, or ``None`` if NVML is not available."""
    import pynvml

    try:
        with _session():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def driver_view(uuid: str) -> DriverView:
    """Return the memory use of the device with a UUID ("GPU-...")."""
    import pynvml

    try:
        with _session():
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return split_use({entry.pid: entry.usedGpuMemory for entry in entries}, os.getpid())
    except pynvml.NVMLError as error:
        return DriverView(note=f"NVML does not describe {uuid} ({error}): what other processes use is unknown")


class GpuUse(NamedTuple):
    """Memory of one GPU, with used bytes by process id; ``None`` if the driver does not report a process's size."""

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    bytes_by_process: Mapping[int, int | None]


@contextmanager
def gpu_uses() -> Iterator[Callable[[], tuple[GpuUse, ...]]]:
    """Keep NVML open, because opening is slow, and yield a function that reads all GPUs: () without a driver."""
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
    """Return the use of a GPU, or ``None`` if the driver refuses access (device lost or being reset)."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return GpuUse(index, str(pynvml.nvmlDeviceGetName(handle)), memory.total, memory.used, by_process(entries))
    except pynvml.NVMLError:
        return None


def by_process(entries: Iterable[Any]) -> dict[int, int | None]:
    """Return bytes by process id, from the ``nvmlProcessInfo_t`` of one device. MIG may list a process repeatedly."""
    found: dict[int, int | None] = {}
    for entry in entries:
        before = found.get(entry.pid, 0)
        known = before is not None and entry.usedGpuMemory is not None
        found[entry.pid] = before + entry.usedGpuMemory if known else None
    return found


def split_use(bytes_by_process: Mapping[int, int | None], own: int) -> DriverView:
    """Separate the use of process ``own`` from the use of all other processes, if the driver reports both."""
    known = [num_bytes for num_bytes in bytes_by_process.values() if num_bytes is not None]
    if len(known) < len(bytes_by_process):
        return DriverView(note="the driver gives no sizes per process here (WSL, MIG): other processes' use is unknown")
    own_bytes = bytes_by_process.get(own)
    if own_bytes is None:
        return DriverView(
            note="the driver lists this process under another id (in a container) or not yet: its use is unknown"
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
