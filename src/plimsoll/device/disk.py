"""Measurement of the rate at which weights and states that do not fit in memory are read from and written to disk.

It takes a second or two. A file is written, synchronized and dropped from the kernel's page cache. It is then read
through a mapping, one page fault at a time, as training reads its weights. Does NOT account for the cache inside a
disk, or for other programs that use the disk.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

_MEASURED_BYTES = 64 << 20


def disk_bytes_per_second(folder: Path) -> float:
    """Measure the mean rate of writing to and reading from the disk of a folder, in bytes per second.

    Raises:
        OSError: if the folder cannot be written to, or the disk is full.
    """
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, prefix="plimsoll-") as file:
        started = time.perf_counter()
        for _ in range(_MEASURED_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), _MEASURED_BYTES, access=mmap.ACCESS_READ) as mapped:
            sum(mapped[begin] for begin in range(0, _MEASURED_BYTES, mmap.PAGESIZE))
        return 2 * _MEASURED_BYTES / (time.perf_counter() - started)
