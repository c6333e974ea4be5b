"""Files of weights that are mapped like a checkpoint, and their current share in the page cache (mincore(2))."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from plimsoll.device.cpu.pages import Stretch


def mapped_weights(path: Path, sizes: Iterable[int]) -> list[Tensor]:
    """Write a file with the given number of pages per weight, drop it from the cache, and return its mapped weights."""
    counts = [pages * mmap.PAGESIZE for pages in sizes]
    with path.open("wb") as file:
        file.write(os.urandom(sum(counts)))
        file.flush()
        os.fsync(file.fileno())  # dirty pages cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # prevent read-ahead
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return list(whole.split(counts))


def cached_share(stretches: Iterable[Stretch]) -> float:
    """Return the share of the pages of some stretches that are in memory."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    found: list[int] = []
    for stretch in stretches:
        begin = stretch.address // mmap.PAGESIZE * mmap.PAGESIZE
        num_pages = -(-(stretch.end - begin) // mmap.PAGESIZE)
        pages = ctypes.create_string_buffer(num_pages)
        assert library.mincore(begin, num_pages * mmap.PAGESIZE, pages) == 0, os.strerror(ctypes.get_errno())
        found += [page & 1 for page in pages.raw]
    return sum(found) / len(found)
