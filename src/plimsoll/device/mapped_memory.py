"""Tensors whose memory is a file: the kernel keeps their pages while there is room and writes them out where not.

    pool = MappedPool()
    state = pool.copy_of(state)

A limit on private memory (``RLIMIT_DATA``, ``RssAnon``) does not count the pages of a file mapped as shared, so this
is where a training on the CPU puts what its budget cannot hold. The files have no names: they are gone as soon as the
last tensor in them and the pool are, however the process ends. What a tensor gives back is used again.

Folder: ``PLIMSOLL_SCRATCH``, else the one for temporary files, else ``/var/tmp`` where that one is kept in memory
(tmpfs), which would be no gain and is refused. Disk blocks are reserved before they are mapped: a full disk is an
`OutputError` and not a SIGBUS in the middle of a kernel.

In a dry run, on fake tensors, the same calls make fake tensors that a trace counts outside the device. Does NOT
cover other systems than Linux, and sparse tensors.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import OutputError
from plimsoll.records.units import format_bytes

SCRATCH_VARIABLE = "PLIMSOLL_SCRATCH"
_ALIGNMENT_BYTES = 64  # what torch's own CPU allocator gives: kernels may round otherwise on other addresses
_FIRST_FILE_BYTES = 16 << 20
_LARGEST_GROWTH_BYTES = 1 << 30
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class MappedPool:
    """Tensors in unnamed files, which grow as needed.

    Args:
        folder: where the files are; ``None`` for `scratch_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._made = StorageSet()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self._files)

    @property
    def used_bytes(self) -> int:
        """Bytes of the files that tensors use."""
        return sum(file.used_bytes for file in self._files)

    def reserve(self, num_bytes: int) -> None:
        """Make sure that tensors of so many bytes together can be made.

        Raises:
            OutputError: if there is no such place on the disk.
        """
        missing_bytes = num_bytes - (self.num_bytes - self.used_bytes)
        if missing_bytes > 0:
            self._files.append(_File(self._where(), missing_bytes))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make a tensor of the shape, strides and type of another; its values are arbitrary.

        A tensor that overlaps itself or has gaps gives one that is contiguous.

        Raises:
            OutputError: if the disk has no room.
        """
        with torch.no_grad(), outside_the_device():
            if isinstance(tensor, FakeTensor) or tensor.numel() == 0:
                made = torch.empty_strided(tensor.shape, dense_strides(tensor), dtype=tensor.dtype)
            else:
                flat = torch.frombuffer(self._take(tensor.numel() * tensor.element_size()), dtype=tensor.dtype)
                made = flat.as_strided(tensor.shape, dense_strides(tensor))
        self._made.add(made)
        return made

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Make a tensor like another, with its values.

        Raises:
            OutputError: if the disk has no room.
        """
        with torch.no_grad():
            return self.empty_like(tensor).copy_(tensor.detach())

    def know(self, tensor: Tensor) -> None:
        """Take a fake tensor that stands for one made here, in a dry run, for one that was."""
        self._made.add(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is a view of, was made here."""
        return tensor in self._made

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedPool:
        """Return itself: tensors that are copied are in no pool."""
        return self

    def _take(self, num_bytes: int) -> memoryview:
        for file in self._files:
            view = file.take(num_bytes)
            if view is not None:
                return view
        growth_bytes = min(max(self.num_bytes, _FIRST_FILE_BYTES), _LARGEST_GROWTH_BYTES)
        self._files.append(_File(self._where(), max(growth_bytes, num_bytes)))
        view = self._files[-1].take(num_bytes)
        assert view is not None
        return view

    def _where(self) -> Path:
        if self._folder is None:
            self._folder = scratch_folder()
        return self._folder


class StorageSet:
    """Storages, known as long as they live; a tensor is in it if its storage is."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> None:
        """Put the storage of a tensor into the set."""
        storage = tensor.untyped_storage()
        address, known = storage._cdata, self._known
        known[address] = weakref.ref(storage, lambda gone: known.pop(address) if known.get(address) is gone else None)

    def discard(self, tensor: Tensor) -> None:
        """Take the storage of a tensor out of the set, if it is in it."""
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._known


class _File:
    """One file, mapped as a whole; which parts of it are free is a list of ``(begin, end)``, in order."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = _rounded(num_bytes, mmap.PAGESIZE)
        self._map = _mapped_file(folder, self.num_bytes)
        self._free = [(0, self.num_bytes)]
        # A tensor can die at any moment, also while this list is being changed: its part is put aside first.
        self._returned: list[tuple[int, int]] = []

    @property
    def used_bytes(self) -> int:
        """Bytes that tensors use."""
        self._collect()
        return self.num_bytes - sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> memoryview | None:
        """Memory of so many bytes, or ``None``; it comes back when nothing refers to it any more."""
        self._collect()
        size_bytes = _rounded(num_bytes, _ALIGNMENT_BYTES)
        fitting = [(end - begin, number) for number, (begin, end) in enumerate(self._free) if end - begin >= size_bytes]
        if not fitting:
            return None
        _, number = min(fitting)
        begin, end = self._free[number]
        self._free[number : number + 1] = [(begin + size_bytes, end)] if end - begin > size_bytes else []
        view = memoryview(self._map)[begin : begin + num_bytes]
        weakref.finalize(view, self._returned.append, (begin, begin + size_bytes)).atexit = False
        return view

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.pop())
            if not self._returned:
                self._free = _merged(self._free)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's own strides if its dimensions in another order are contiguous; else contiguous ones."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(order).is_contiguous():
        return tensor.stride()
    return tuple(prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))


def _merged(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return merged


def _rounded(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def _mapped_file(folder: Path, num_bytes: int) -> mmap.mmap:
    """An unnamed file of so many bytes, all of them reserved on the disk."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="plimsoll-", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)
    except OSError as error:
        raise OutputError(
            f"cannot keep {format_bytes(num_bytes)} of the training in a file in {folder}: {error.strerror or error}; "
            f"free some space there, or set {SCRATCH_VARIABLE} to a folder on a disk that has it"
        ) from error


def scratch_folder() -> Path:
    """Return the folder for files that are mapped, on a disk.

    Raises:
        OutputError: if the folder that was given, or all there are, are kept in memory or do not exist.
    """
    given = os.environ.get(SCRATCH_VARIABLE)
    candidates = [Path(given)] if given else [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for folder in candidates:
        if folder.is_dir() and _file_system_of(folder) not in _IN_MEMORY:
            return folder
    raise OutputError(
        f"cannot keep part of the training in a file in {' or '.join(map(str, candidates))}: that is no folder, or "
        f"kept in memory (tmpfs), where it frees nothing; set {SCRATCH_VARIABLE} to a folder on a disk"
    )


def _file_system_of(folder: Path) -> str:
    """The type of the file system, ``unknown`` where the kernel does not say; see proc_pid_mountinfo(5)."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    types = [mount.partition(" - ")[2].split()[0] for mount in mounts if mount.split()[2] == number]
    return types[0] if types else "unknown"
