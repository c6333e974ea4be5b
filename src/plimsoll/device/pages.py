"""The pages of files that tensors are mapped from: which they are, bring them, drop them, and how fast they come.

    bring(stretches_of(block.parameters()))     # before it computes
    drop(stretches_of(block.parameters()))      # after it, where the page cache cannot hold the whole model

Bringing is ``MADV_POPULATE_READ``: in a thread it reads with the device's full depth, copies nothing, and leaves the
page table filled; Linux before 5.14 has ``MADV_WILLNEED`` instead, which does less. Which of these pays is measured in
docs/LOG.md. Both are hints: where the kernel refuses one, the pages come when they are touched. Dropped are only pages
of shared mappings, which change no value: of private ones what was written would be lost.

Source: madvise(2), posix_fadvise(2), proc_pid_maps(5). Covers Linux; elsewhere the kernel keeps its own order.
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

from plimsoll.device import cgroup

if TYPE_CHECKING:
    from torch import Tensor

_WILL_NEED, _DO_NOT_NEED, _PAGE_OUT, _POPULATE_READ = 3, 4, 21, 22
_PIECE_BYTES = 2 << 20  # of one call: between calls the process can map and unmap, which a long one holds up
_SAMPLE_BYTES, _MOST_SAMPLES = 8 << 20, 8


class Stretch(NamedTuple):
    """Addresses of this process that hold weights."""

    address: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.num_bytes


def stretches_of(tensors: Iterable[Tensor]) -> tuple[Stretch, ...]:
    """Return where tensors lie, in order; what shares or touches a page is one stretch."""
    page = mmap.PAGESIZE
    found = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    merged: list[list[int]] = []
    for begin, end in found:
        if merged and begin <= -(-merged[-1][1] // page) * page:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return tuple(Stretch(begin, end - begin) for begin, end in merged)


def bring(stretches: Iterable[Stretch]) -> None:
    """Have the pages of some stretches in memory; returns when they are there."""
    for stretch in stretches:
        begin, end = _outer(stretch)
        for piece in range(begin, end, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, end - piece)
            if _advise(piece, num_bytes, _POPULATE_READ) == errno.EINVAL:
                _advise(piece, num_bytes, _WILL_NEED)


def drop(stretches: Iterable[Stretch]) -> None:
    """Let the kernel have the whole pages of some stretches back, in this process and in the page cache."""
    mappings = _shared_mappings()
    for stretch in stretches:
        begin, end = _inner(stretch)
        number = bisect_right(mappings, begin, key=lambda mapping: mapping.begin) - 1
        if begin >= end or number < 0 or mappings[number].end < end:
            continue
        mapping = mappings[number]
        if not _drop_of_file(mapping, begin, end):
            _advise(begin, end - begin, _PAGE_OUT)


def cache_room_bytes() -> int:
    """Return what the page cache may grow to: what the machine and its control groups have left, now."""
    import psutil

    rooms = [psutil.virtual_memory().available, cgroup.free_bytes()]
    return min(room for room in rooms if room is not None)


def cold_bytes_per_second(files: Sequence[Path]) -> float:
    """Measure how fast files come from their disk: some MiB here and there that are dropped from the page cache before.

    What another process has mapped stays in the cache, and reads faster than the disk.

    Args:
        files: the files, of some bytes together.

    Raises:
        OSError: if one cannot be read.
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
    """Places in the files, spread over all of their bytes."""
    places = [(path, offset) for path in files for offset in range(0, max(path.stat().st_size, 1), _SAMPLE_BYTES)]
    return places[:: -(-len(places) // _MOST_SAMPLES)]


class _Mapping(NamedTuple):
    """A shared mapping of a file; ``path`` is empty where the file has no name any more."""

    begin: int
    end: int
    offset: int
    path: str


def _shared_mappings() -> list[_Mapping]:
    """The shared mappings of this process, in the order of their addresses."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, rights, offset, _, inode, *path = line.split(maxsplit=5)
        if rights.endswith("s") and inode != "0":
            begin, _, end = addresses.partition("-")
            name = path[0] if path and not path[0].endswith(" (deleted)") else ""
            found.append(_Mapping(int(begin, 16), int(end, 16), int(offset, 16), name))
    return found


def _drop_of_file(mapping: _Mapping, begin: int, end: int) -> bool:
    """Unmap pages and drop them from the cache; ``False`` where the file cannot be opened by its name."""
    try:
        descriptor = os.open(mapping.path, os.O_RDONLY)
    except OSError:
        return False
    try:
        _advise(begin, end - begin, _DO_NOT_NEED)  # the cache keeps what is mapped
        os.posix_fadvise(descriptor, mapping.offset + begin - mapping.begin, end - begin, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


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
    """Give a hint and return the error's number, 0 for none; other threads run meanwhile."""
    function = _madvise()
    return ctypes.get_errno() if function is not None and function(address, num_bytes, advice) else 0
