"""How fast the disk is on which a training keeps what its memory cannot hold: measured, in less than a second or two.

A file is written and synchronised, dropped from the kernel's page cache, and read through a mapping, page fault by page
fault, as a training reads its weights. Does NOT know what a disk's own cache holds, and other writers meanwhile.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

_MEASURED_BYTES = 64 << 20


def disk_bytes_per_second(folder: Path) -> float:
    """Measure bytes a second that are written to a folder's disk and read from it again; the mean of both ways.

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
