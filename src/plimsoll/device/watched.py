"""Memory use of processes observed from outside, and every limit that applies to them.

Covers Linux: a process with its descendants, or the processes of the machine with the most private memory. Limits are
the machine's memory and swap, /dev/shm in the process's mount namespace, control groups, ``RLIMIT_DATA``, ``RLIMIT_AS``
and GPUs. The driver reports the GPU memory of each process by its id on the host. In a container, where processes have
other ids, this memory cannot be assigned to them.

Sources: proc_pid_status(5), proc_pid_limits(5). A sample needs no torch.

Does NOT read smaps, which is slow for large processes, so pages shared after a fork count in each process. Also not
covered: huge pages, limits on locked memory, and file system quotas.
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
    """Return the current memory use of a process and its descendants; empty if it has ended.

    Raises:
        InputError: if the process belongs to another user and the machine hides it.
    """
    try:
        first = _use_of(pid, gpus)
    except PermissionError:
        raise InputError(
            f"cannot read process {pid}, which belongs to another user: give the --pid of one of your processes"
        ) from None
    if first is None:
        return ()
    return (first, *_readable(_descendants(pid), gpus))


def largest(num_processes: int, gpus: Sequence[GpuUse] = ()) -> tuple[ProcessUse, ...]:
    """Return the processes of the machine with the most private memory, largest first.

    Processes that the machine hides from this user are omitted.
    """
    sizes = [(size, pid) for pid in psutil.pids() if (size := _private_bytes(pid))]
    found = _readable((pid for _, pid in heapq.nlargest(num_processes, sizes)), gpus)
    return tuple(sorted(found, key=lambda use: -use.private_bytes))


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process.

    The kernel's list of children of each thread is read if it exists. Searching all processes, as psutil does, takes
    ten times as long on a machine with a thousand of them.
    """
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    found = [pid]
    for parent in found:  # the loop appends to this list
        with suppress(OSError):
            found += [child for task in os.listdir(f"/proc/{parent}/task") for child in _children(parent, task)]
    return found[1:]


def _children(pid: int, task: str) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split()]
    except OSError:  # the thread has ended
        return []


def _private_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes; 0 for a kernel thread, or if it cannot be read."""
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
    """Return the memory use of one process, or ``None`` if it has ended or is a zombie."""
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
    """Return the bytes that a process uses on all GPUs.

    ``None`` if the driver does not list the process or does not report its size.
    """
    sizes = [gpu.bytes_by_process[pid] for gpu in gpus if pid in gpu.bytes_by_process]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def lines_of(
    processes: Sequence[ProcessUse], gpus: Sequence[GpuUse] = (), *, is_machine: bool = False
) -> tuple[Line, ...]:
    """Return every limit that applies to these processes, each with its bytes in use.

    Args:
        processes: the processes with their memory use. /dev/shm is read in the mount namespace of the first process.
        gpus: the current use of the GPUs.
        is_machine: whether to return the limits of the whole machine: this process's control groups and every GPU.
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
    """Return the size and use of /dev/shm as mounted in a process.

    If the mounts of the process are hidden, /dev/shm of this process is read.
    """
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
