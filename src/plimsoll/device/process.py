"""What a process uses of host memory, from the Linux files under /proc: microseconds (but `code_bytes`), no torch.

*Private* memory is what only this process can hold and nothing but freeing it gives back: anonymous pages (RssAnon:
tensors, heap, stacks), not files that are mapped (a corpus, libraries) and not shared memory (a DataLoader's batches).
*Data* is what ``RLIMIT_DATA`` counts: private writable address space (VmData), touched or not.

Source: proc_pid_statm(5), proc_pid_status(5), proc_pid_clear_refs(5). Since Linux 6.2 the kernel may count up to 128
KiB per core late. Not covered: other systems than Linux, swapped pages.
"""

from __future__ import annotations

import os
import re
import resource
from typing import NamedTuple

_PAGE_BYTES = resource.getpagesize()
_HIGH_WATER = re.compile(rb"VmHWM:\s*(\d+) kB.*?RssFile:\s*(\d+) kB\s*RssShmem:\s*(\d+) kB", re.DOTALL)


class PrivateMemory(NamedTuple):
    """One reading of a process; the two numbers belong to the same moment."""

    private_bytes: int
    data_bytes: int


def private_memory(pid: int | str = "self") -> PrivateMemory:
    """Read private and data bytes of a process.

    ``data_bytes`` includes the main thread's stack (VmStk, usually 132 KiB), which the same file adds to VmData.

    Raises:
        OSError: if there is no such process.
    """
    _, resident, shared, _, _, data, _ = _statm(pid)
    return PrivateMemory((resident - shared) * _PAGE_BYTES, data * _PAGE_BYTES)


def private_bytes(pid: int | str = "self") -> int:
    """Return the private memory of a process in bytes (see `private_memory`)."""
    return private_memory(pid).private_bytes


def data_bytes(pid: int | str = "self") -> int:
    """Return what ``RLIMIT_DATA`` counts of a process in bytes (see `private_memory`)."""
    return private_memory(pid).data_bytes


def address_space_bytes() -> int:
    """Return what ``RLIMIT_AS`` counts of this process in bytes: every mapping (VmSize)."""
    return _statm("self")[0] * _PAGE_BYTES


def code_bytes() -> int:
    """Return the address space of this process, in bytes, that holds code made while it runs, such as oneDNN's.

    ``RLIMIT_DATA`` counts it, since it can be written; of the 256 KiB that a kernel of oneDNN maps it uses some KiB.
    """
    num_bytes = 0
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            addresses, permissions, _ = line.split(b" ", 2)
            if permissions == b"rwxp":
                first, behind = addresses.split(b"-")
                num_bytes += int(behind, 16) - int(first, 16)
    return num_bytes


class PeakCounter:
    """The highest private memory of this process since the last `reset`.

    The kernel keeps the highest resident size, files and shared memory included; the most of those that any `read` saw
    is subtracted, so a run that maps more of a file after its peak reads low by that much: reset at every step. What is
    never returned is more than was used, if it is read while most of the files are mapped (a checkpoint that is
    restored). Where the kernel refuses the reset (some sandboxes), the highest value that `read` was given is returned
    instead.
    """

    def __init__(self) -> None:
        self._kernel_counts = True
        self._highest_seen_bytes = 0
        self._most_files_bytes = 0

    def reset(self) -> None:
        """Start a new peak from what is used now."""
        self._highest_seen_bytes, self._most_files_bytes = private_bytes(), 0
        self._kernel_counts = _reset_high_water_mark()

    def read(self, used_bytes: int) -> int:
        """Return the peak in bytes, given what is used now."""
        self._highest_seen_bytes = max(self._highest_seen_bytes, used_bytes)
        if not self._kernel_counts:
            return self._highest_seen_bytes
        resident_bytes, files_bytes = _high_water()
        self._most_files_bytes = max(self._most_files_bytes, files_bytes)
        return max(self._highest_seen_bytes, resident_bytes - self._most_files_bytes)


def _statm(pid: int | str) -> list[int]:
    descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY)  # a third of the time of open()
    try:
        return [int(word) for word in os.read(descriptor, 256).split()]
    finally:
        os.close(descriptor)


def _reset_high_water_mark() -> bool:
    try:
        with open("/proc/self/clear_refs", "wb") as file:
            file.write(b"5")
    except OSError:
        return False
    return True


def _high_water() -> tuple[int, int]:
    """The most that was resident, and what of files and shared memory is now."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        highest, files, shared = map(int, _HIGH_WATER.search(file.read()).groups())  # type: ignore[union-attr]
    return highest * 1024, (files + shared) * 1024
