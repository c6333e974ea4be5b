"""Every limit on processes that are watched from outside, with what is used of it.

The memory and swap of the machine, /dev/shm as the watched process sees it, the control groups of each process,
``RLIMIT_DATA`` and ``RLIMIT_AS`` of each, and each GPU that one of them uses, or a process does that is not known here
by the driver's number, as in a container (all GPUs, where a machine is watched).
Does NOT cover huge pages, ulimits on locked memory, and quotas of file systems.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from plimsoll.device.cpu import cgroup
from plimsoll.device.cuda.nvml import GpuUse
from plimsoll.records.watch import Line, ProcessUse


def lines_of(
    processes: Sequence[ProcessUse], gpus: Sequence[GpuUse] = (), *, is_machine: bool = False
) -> tuple[Line, ...]:
    """Return every limit that holds for these processes.

    Args:
        processes: the first is the one whose /dev/shm counts.
        gpus: as they are now.
        is_machine: the machine is watched: limits on this process's control groups count, and every GPU.
    """
    first = os.getpid() if is_machine or not processes else processes[0].pid
    pids = [first] if is_machine else [use.pid for use in processes]
    groups = [
        Line(kind="cgroup", name=limit.source, used_bytes=used_bytes, limit_bytes=limit.bytes)
        for limit, used_bytes in cgroup.uses(pids)
    ]
    return (*_of_machine(), *_shm(first), *groups, *_resource_limits(processes), *_of_gpus(processes, gpus, is_machine))


def _of_machine() -> list[Line]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    used_bytes = memory.total - memory.available
    lines = [Line(kind="machine", name="memory of the machine", used_bytes=used_bytes, limit_bytes=memory.total)]
    if swap.total:
        lines.append(Line(kind="swap", name="swap of the machine", used_bytes=swap.used, limit_bytes=swap.total))
    return lines


def _shm(pid: int) -> list[Line]:
    """/dev/shm in the mounts of a process, else, where they are hidden, as it is here."""
    for path in (Path("/proc", str(pid), "root", "dev/shm"), Path("/dev/shm")):
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        used_bytes, limit_bytes = ((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_blocks * found.f_frsize)
        return (
            [Line(kind="shm", name="/dev/shm", used_bytes=used_bytes, limit_bytes=limit_bytes)] if limit_bytes else []
        )
    return []


def _resource_limits(processes: Sequence[ProcessUse]) -> list[Line]:
    lines = []
    for use in processes:
        if use.data_limit_bytes is not None:
            name = f"RLIMIT_DATA of {use.pid}"
            lines.append(Line(kind="data", name=name, used_bytes=use.data_bytes, limit_bytes=use.data_limit_bytes))
        if use.address_limit_bytes is not None:
            name = f"RLIMIT_AS of {use.pid}"
            lines.append(
                Line(kind="address", name=name, used_bytes=use.address_bytes, limit_bytes=use.address_limit_bytes)
            )
    return lines


def _of_gpus(processes: Sequence[ProcessUse], gpus: Sequence[GpuUse], is_machine: bool) -> list[Line]:
    pids = {use.pid for use in processes}
    return [
        Line(kind="gpu", name=f"GPU {gpu.number} ({gpu.name})", used_bytes=gpu.used_bytes, limit_bytes=gpu.total_bytes)
        for gpu in gpus
        if is_machine or any(pid in pids or not psutil.pid_exists(pid) for pid in gpu.bytes_by_process)
    ]
