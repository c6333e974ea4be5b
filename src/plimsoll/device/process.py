"""Host memory use of a process, read from Linux /proc files in microseconds (except `code_bytes`), without torch.

*Private memory* is anonymous memory (RssAnon: tensors, heap, stacks). Only one process holds it, and it is returned
only when freed. Mapped files (a corpus, libraries) and shared memory (DataLoader batches) do not count. *Data* is
private writable address space (VmData), touched or not. ``RLIMIT_DATA`` limits it.

Sources: proc_pid_statm(5), proc_pid_status(5), proc_pid_clear_refs(5). Since Linux 6.2, counters may lag by up to 128
KiB per core. Not covered: systems other than Linux, and swapped pages.
"""

from __future__ import annotations

import os
import re
import resource
from typing import NamedTuple

_PAGE_BYTES = resource.getpagesize()
_HIGH_WATER = re.compile(rb"VmHWM:\s*(\d+) kB.*?RssFile:\s*(\d+) kB\s*RssShmem:\s*(\d+) kB", re.DOTALL)


class PrivateMemory(NamedTuple):
    """Memory of a process in bytes, with both numbers read at the same moment.

    Attributes:
        private_bytes: private memory: anonymous memory that is resident.
        data_bytes: data: private writable address space, touched or not.
    """

    private_bytes: int
    data_bytes: int


def private_memory(pid: int | str = "self") -> PrivateMemory:
    """Return the private memory and the data of a process (see the module for these terms).

    ``data_bytes`` includes the stack of the main thread (VmStk, usually 132 KiB), because statm adds it to VmData.

    Raises:
        OSError: if there is no such process.
    """
    _, resident, shared, _, _, data, _ = _statm(pid)
    return PrivateMemory((resident - shared) * _PAGE_BYTES, data * _PAGE_BYTES)


def private_bytes(pid: int | str = "self") -> int:
    """Return the private memory of a process in bytes (see `private_memory`)."""
    return private_memory(pid).private_bytes


def data_bytes(pid: int | str = "self") -> int:
    """Return the data of a process in bytes, which ``RLIMIT_DATA`` limits (see `private_memory`)."""
    return private_memory(pid).data_bytes


def address_space_bytes() -> int:
    """Return the address space of this process in bytes, which ``RLIMIT_AS`` limits: all mappings (VmSize)."""
    return _statm("self")[0] * _PAGE_BYTES


def code_bytes() -> int:
    """Return the bytes of address space with code generated at run time, such as oneDNN kernels.

    ``RLIMIT_DATA`` counts generated code because it is writable. oneDNN maps 256 KiB per kernel but uses only a few KiB
    of them.
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

    The kernel only tracks the peak of resident memory, which includes files and shared memory. So the largest size of
    files and shared memory at any `read` is subtracted.

    If more file pages become resident after the peak, the result is too low by their size. To limit this error, call
    `reset` at every step. The result is never too high if `read` is called while file mappings are largest, as in a
    restore. If the kernel refuses the reset (some sandboxes), the result is the highest value passed to `read`.
    """

    def __init__(self) -> None:
        self._kernel_counts = True
        self._highest_seen_bytes = 0
        self._most_files_bytes = 0

    def reset(self) -> None:
        """Set the peak to the current private memory."""
        self._highest_seen_bytes, self._most_files_bytes = private_bytes(), 0
        self._kernel_counts = _reset_high_water_mark()

    def read(self, used_bytes: int) -> int:
        """Return the peak of private memory in bytes.

        Args:
            used_bytes: the current private memory.
        """
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
    """Return the peak of resident memory, and the current resident size of files and shared memory, in bytes."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        highest, files, shared = map(int, _HIGH_WATER.search(file.read()).groups())  # type: ignore[union-attr]
    return highest * 1024, (files + shared) * 1024
