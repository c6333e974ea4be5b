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
    """Memory use of one device as the driver reports it; ``None`` if the driver does not report it.

    Attributes:
        own_bytes: bytes of this process.
        others_bytes: bytes of all other processes.
        note: the reason why a number is ``None``; ``None`` if both numbers are known.
    """

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
    """Memory of one GPU.

    Attributes:
        number: index of the GPU.
        name: name of the GPU.
        total_bytes: total memory of the GPU.
        used_bytes: memory in use on the GPU.
        bytes_by_process: for each process id, the bytes in use; ``None`` if the driver does not report the size.
    """

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    bytes_by_process: Mapping[int, int | None]


@contextmanager
def gpu_uses() -> Iterator[Callable[[], tuple[GpuUse, ...]]]:
    """Yield a function that returns the memory use of all GPUs; without a driver, it returns no GPUs.

    NVML stays open inside the ``with`` block, because opening it is slow.
    """
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
    """Return the memory use of a GPU; ``None`` if the driver refuses access (device lost or being reset)."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return GpuUse(index, str(pynvml.nvmlDeviceGetName(handle)), memory.total, memory.used, by_process(entries))
    except pynvml.NVMLError:
        return None


def by_process(entries: Iterable[Any]) -> dict[int, int | None]:
    """Return the bytes that each process uses on one device, by process id; ``None`` if a size is not reported.

    Args:
        entries: the ``nvmlProcessInfo_t`` of the device. With MIG, a process may be listed several times.
    """
    found: dict[int, int | None] = {}
    for entry in entries:
        before = found.get(entry.pid, 0)
        known = before is not None and entry.usedGpuMemory is not None
        found[entry.pid] = before + entry.usedGpuMemory if known else None
    return found


def split_use(bytes_by_process: Mapping[int, int | None], own: int) -> DriverView:
    """Separate the memory use of one process from the use of all other processes.

    Args:
        bytes_by_process: bytes by process id, as `by_process` returns them.
        own: id of the process.
    """
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
