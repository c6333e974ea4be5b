"""Processes that are watched from outside: what they use of memory, and every limit on it with what is used of that.

Source: proc_pid_status(5), proc_pid_limits(5); a sample takes no torch. Covers Linux: a process and what it started, or
the largest of the machine; the memory and swap of the machine, /dev/shm as the watched process sees it, control groups,
``RLIMIT_DATA`` and ``RLIMIT_AS``, and GPUs where their driver says which process has what (it knows processes in a
container by other numbers, which are not matched).

Does NOT read smaps (slow on large processes): pages that a fork shares are counted in each process. Nor huge pages,
ulimits on locked memory, and quotas of file systems.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from plimsoll.device.cpu import cgroup
from plimsoll.device.cuda.nvml import GpuUse
from plimsoll.device.process import private_bytes
from plimsoll.errors import InputError
from plimsoll.records.watch import Line, ProcessUse

_FIELD = re.compile(r"^(\w+):\s+(.+)", re.MULTILINE)
_LIMITS = re.compile(r"^Max (data size|address space) +(\d+)", re.MULTILINE)


def family_of(pid: int, gpus: Sequence[GpuUse] = ()) -> tuple[ProcessUse, ...]:
    """Return a process and its descendants, as they are now; empty once it has ended.

    Raises:
        InputError: if the process belongs to someone else and the machine hides it.
    """
    try:
        first = _use_of(pid, gpus)
    except PermissionError:
        raise InputError(
            f"cannot read process {pid}, it is another user's: give the --pid of one of your own"
        ) from None
    if first is None:
        return ()
    return (first, *_readable(_descendants(pid), gpus))


def largest(num_processes: int, gpus: Sequence[GpuUse] = ()) -> tuple[ProcessUse, ...]:
    """Return those processes of the machine that have the most private memory, the largest first.

    Processes that the machine hides from this user are left out.
    """
    sizes = [(size, pid) for pid in psutil.pids() if (size := _private_bytes(pid))]
    found = _readable((pid for _, pid in heapq.nlargest(num_processes, sizes)), gpus)
    return tuple(sorted(found, key=lambda use: -use.private_bytes))


def _descendants(pid: int) -> list[int]:
    """What a process started, and what those started.

    Each thread's list of children is read, where the kernel has them: looking through every process of a machine, as
    psutil does, takes ten times as long on one with a thousand.
    """
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    found = [pid]
    for parent in found:  # it grows meanwhile
        with suppress(OSError):
            found += [child for task in os.listdir(f"/proc/{parent}/task") for child in _children(parent, task)]
    return found[1:]


def _children(pid: int, task: str) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split()]
    except OSError:  # the thread has ended
        return []


def _private_bytes(pid: int) -> int:
    """As far as it can be read; kernel threads have none."""
    try:
        return private_bytes(pid)
    except OSError:
        return 0


def _readable(pids: Iterable[int], gpus: Sequence[GpuUse]) -> list[ProcessUse]:
    found = []
    for pid in pids:
        try:
            use = _use_of(pid, gpus)
        except PermissionError:
            continue
        if use is not None:
            found.append(use)
    return found


def _use_of(pid: int, gpus: Sequence[GpuUse]) -> ProcessUse | None:
    """Read one process; ``None`` where it has ended, also where its parent has not asked how."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = dict(_FIELD.findall((folder / "status").read_text(errors="replace")))
        limits = {name: int(size) for name, size in _LIMITS.findall((folder / "limits").read_text())}
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "VmData" not in fields:
        return None
    return ProcessUse(
        pid=pid,
        parent=int(fields["PPid"]),
        name=fields["Name"],
        private_bytes=_bytes(fields, "RssAnon"),
        file_bytes=_bytes(fields, "RssFile"),
        shared_bytes=_bytes(fields, "RssShmem"),
        swap_bytes=_bytes(fields, "VmSwap"),
        data_bytes=_bytes(fields, "VmData") + _bytes(fields, "VmStk"),
        data_limit_bytes=limits.get("data size"),
        address_bytes=_bytes(fields, "VmSize"),
        address_limit_bytes=limits.get("address space"),
        gpu_bytes=_gpu_bytes(pid, gpus),
    )


def _bytes(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0").removesuffix("kB")) * 1024


def _gpu_bytes(pid: int, gpus: Sequence[GpuUse]) -> int | None:
    """On all GPUs; ``None`` where the driver names the process on none, or gives no size."""
    sizes = [gpu.bytes_by_process[pid] for gpu in gpus if pid in gpu.bytes_by_process]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


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
