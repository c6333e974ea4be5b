"""Control over pages of memory-mapped files: load them, drop them, attribute them and measure how fast they load.

    bring(stretches_of(block.parameters()))     # before the block computes
    drop(stretches_of(block.parameters()))      # afterwards, if the page cache cannot hold the whole model

Both calls are hints. If the kernel refuses one, pages are loaded when they are touched. A page of a private mapping
(copy on write) belongs to the file until it is written, and is private memory afterwards.

Sources: madvise(2), posix_fadvise(2), proc_pid_maps(5), proc_pid_pagemap(5). Covers Linux; on other systems, the hints
have no effect.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plimsoll.device.cpu import cgroup, data_limit

if TYPE_CHECKING:
    from torch import Tensor

_WILL_NEED, _DO_NOT_NEED, _HUGE_PAGE, _PAGE_OUT, _POPULATE_READ = 3, 4, 14, 21, 22
_BYTES_AT_ONCE = 2 << 20  # per call: a longer call would block other threads that map or unmap memory
_SAMPLE_BYTES, _MOST_SAMPLES = 8 << 20, 8

# From asm-generic/mman.h; Python has it since 3.13. Without it, vm.overcommit refuses files larger than memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_ENTRY_BYTES, _PAGES_AT_ONCE = 8, 1 << 15
_IS_FILES, _IS_THERE = 1 << 61, 3 << 62  # bits of an entry of the page map: page of a file; page in memory or swap


class Stretch(NamedTuple):
    """A range of addresses in the memory of this process, which holds weights."""

    address: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first address after the range."""
        return self.address + self.num_bytes


def stretches_of(tensors: Iterable[Tensor]) -> tuple[Stretch, ...]:
    """Return the address ranges of tensors, sorted by address. Ranges that share or touch a page are merged."""
    page = mmap.PAGESIZE
    found = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    merged: list[list[int]] = []
    for begin, end in found:
        if merged and begin <= -(-merged[-1][1] // page) * page:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return tuple(Stretch(begin, end - begin) for begin, end in merged)


def copied_on_write(descriptor: int) -> mmap.mmap:
    """Map a whole file as memory that can be written. Writes stay in memory and do not reach the file.

    A limit of Plimsoll counts only the pages that were written. ``ulimit -d`` counts the whole mapping.

    Args:
        descriptor: the descriptor of the open file.

    Raises:
        OSError: if a limit refuses the address space.
    """
    num_bytes = os.fstat(descriptor).st_size
    with data_limit.with_untouched(num_bytes):
        return mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)


def bring(stretches: Iterable[Stretch]) -> None:
    """Load the pages of these ranges from their files into memory, and return when they are loaded."""
    for stretch in stretches:
        begin, end = _outer(stretch)
        for address in range(begin, end, _BYTES_AT_ONCE):
            num_bytes = min(_BYTES_AT_ONCE, end - address)
            # In a thread, this reads at the disk's full queue depth, copies nothing and fills the page table
            # (docs/LOG.md).
            if _advise(address, num_bytes, _POPULATE_READ) == errno.EINVAL:  # Linux before 5.14
                _advise(address, num_bytes, _WILL_NEED)


def drop(stretches: Iterable[Stretch]) -> None:
    """Release the pages of these ranges, from this process and from the page cache.

    Pages that are only partly in a range stay. Pages of private mappings also stay, because changes to them would be
    lost.
    """
    mappings = [mapping for mapping in _mappings() if mapping.is_shared]  # dropping private mappings would lose writes
    for stretch in stretches:
        begin, end = _inner(stretch)
        number = bisect_right(mappings, begin, key=lambda mapping: mapping.begin) - 1
        if begin >= end or number < 0 or mappings[number].end < end:
            continue
        mapping = mappings[number]
        if not _drop_of_file(mapping, begin, end):
            _advise(begin, end - begin, _PAGE_OUT)


def cache_free_bytes() -> int:
    """Return the bytes by which the page cache can grow now, on the machine and within its control groups."""
    import psutil

    free_bytes = [psutil.virtual_memory().available, cgroup.free_bytes()]
    return min(free for free in free_bytes if free is not None)


def cold_bytes_per_second(files: Sequence[Path]) -> float:
    """Measure the read rate of files from disk, in bytes per second.

    Samples of 8 MiB, spread over the files, are dropped from the page cache and then read. Pages that another process
    has mapped stay in the cache, and read faster than the disk.

    Args:
        files: the files; at least one is not empty.

    Raises:
        OSError: if a file cannot be read.
    """
    samples = _samples(files)
    buffer = bytearray(1 << 20)
    num_bytes, seconds = 0, 0.0
    for path, offset in samples:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, offset, _SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
            started, begin = time.perf_counter(), num_bytes
            while (done := num_bytes - begin) < _SAMPLE_BYTES and (
                got := os.preadv(descriptor, [buffer], offset + done)
            ):
                num_bytes += got
            seconds += time.perf_counter() - started
        finally:
            os.close(descriptor)
    return num_bytes / max(seconds, 1e-9)


def _samples(files: Sequence[Path]) -> list[tuple[Path, int]]:
    """Return the file and offset of each sample, spread evenly over the bytes of all files."""
    places = [(path, offset) for path in files for offset in range(0, max(path.stat().st_size, 1), _SAMPLE_BYTES)]
    return places[:: -(-len(places) // _MOST_SAMPLES)]


class _Mapping(NamedTuple):
    """A mapping of a file into this process. ``path`` is empty if the file was deleted."""

    begin: int
    end: int
    offset: int
    path: str
    is_shared: bool


def _mappings() -> list[_Mapping]:
    """Return the mappings of files into this process, ordered by address; empty if they cannot be read."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        if inode != "0":
            begin, _, end = addresses.partition("-")
            name = path[0] if path and not path[0].endswith(" (deleted)") else ""
            found.append(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), name, rights.endswith("s")))
    return found


class FileMappings:
    """The file mappings of this process when this object was created."""

    def __init__(self) -> None:
        self._mappings = _mappings()

    def stays_in_file(self, tensor: Tensor) -> bool:
        """Return whether training leaves the pages of a tensor in a mapped file.

        This is so if the mapping is shared, or if the tensor needs no gradient and so is not written.
        """
        mapping = self._at(tensor.untyped_storage().data_ptr()) if _has_address(tensor) else None
        return mapping is not None and (mapping.is_shared or not tensor.requires_grad)

    def private_bytes(self, tensor: Tensor) -> int:
        """Return the private memory that the storage of a CPU tensor takes, in bytes.

        In a private mapping of a file, only pages that were written count.
        """
        storage = tensor.untyped_storage()
        mapping = self._at(storage.data_ptr()) if _has_address(tensor) else None
        if mapping is None:
            return storage.nbytes()
        return 0 if mapping.is_shared else _written_bytes(Stretch(storage.data_ptr(), storage.nbytes()))

    def _at(self, address: int) -> _Mapping | None:
        number = bisect_right(self._mappings, address, key=lambda mapping: mapping.begin) - 1
        return self._mappings[number] if number >= 0 and address < self._mappings[number].end else None


def _has_address(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and in CPU memory. Fake tensors and tensors on ``meta`` are not."""
    return str(tensor.layout) == "torch.strided" and tensor.untyped_storage().device.type == "cpu"


def _written_bytes(stretch: Stretch) -> int:
    """Return the bytes of a range in a private mapping that this process has written, in memory or swapped out.

    If the kernel does not report which pages were written, all bytes of the range are returned.
    """
    begin, end = (address // mmap.PAGESIZE for address in _outer(stretch))
    num_pages = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for first in range(begin, end, _PAGES_AT_ONCE):
                file.seek(first * _ENTRY_BYTES)
                entries = memoryview(file.read(_ENTRY_BYTES * min(_PAGES_AT_ONCE, end - first))).cast("Q")
                num_pages += sum(entry & _IS_FILES == 0 and entry & _IS_THERE != 0 for entry in entries)
    except OSError:  # the page map is not readable
        return stretch.num_bytes
    return min(num_pages * mmap.PAGESIZE, stretch.num_bytes)


def _drop_of_file(mapping: _Mapping, begin: int, end: int) -> bool:
    """Unmap pages and drop them from the page cache; return ``False`` if the file cannot be opened by its path."""
    try:
        descriptor = os.open(mapping.path, os.O_RDONLY)
    except OSError:
        return False
    try:
        _advise(begin, end - begin, _DO_NOT_NEED)  # the cache keeps mapped pages
        os.posix_fadvise(descriptor, mapping.offset + begin - mapping.begin, end - begin, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def prefer_large(stretches: Iterable[Stretch]) -> None:
    """Request huge pages, which are allocated much faster, for memory that is about to be filled."""
    for begin, end in map(_inner, stretches):
        _advise(begin, max(end - begin, 0), _HUGE_PAGE)


def _outer(stretch: Stretch) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return stretch.address // page * page, -(-stretch.end // page) * page


def _inner(stretch: Stretch) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return -(-stretch.address // page) * page, stretch.end // page * page


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Give the kernel a hint about a range of addresses, and return the error number; 0 means no error.

    Other threads run meanwhile.
    """
    function = _madvise()
    return ctypes.get_errno() if function is not None and function(address, num_bytes, advice) else 0
