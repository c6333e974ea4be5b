"""Tensors in memory-mapped files: the kernel keeps their pages in memory while it can, and else writes them to disk.

    state = MappedPool().copy_of(state)
    table = create(path, (num_rows, 300), torch.float32, fill)

A limit on private memory (``RLIMIT_DATA``, ``RssAnon``) does not count pages of a shared file mapping. So training on
the CPU stores tensors that do not fit the budget in such files. In a dry run, a pool returns fake tensors, which a
trace does not count as device memory.

Does NOT cover systems other than Linux, sparse tensors, and two processes that create the same file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import OutputError
from plimsoll.records.units import format_bytes

SCRATCH_VARIABLE = "PLIMSOLL_SCRATCH"
_ALIGNMENT_BYTES = 64  # as in torch's CPU allocator: kernels may round differently at other alignments
_FIRST_FILE_BYTES = 16 << 20
_LARGEST_GROWTH_BYTES = 1 << 30
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class MappedPool:
    """A pool of memory for tensors, in unnamed mapped files. Files are added as needed.

    The files are deleted when the pool and the last tensor in them are freed, however the process ends.

    Args:
        folder: the folder of the files; ``None`` for the result of `scratch_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: list[_File] = []
        self._made = StorageSet()

    @property
    def num_bytes(self) -> int:
        """The total size of the pool's files in bytes."""
        return sum(file.num_bytes for file in self._files)

    @property
    def used_bytes(self) -> int:
        """The bytes of the pool's files that tensors use."""
        return sum(file.used_bytes for file in self._files)

    def reserve(self, num_bytes: int) -> None:
        """Reserve disk space for tensors of ``num_bytes`` in total.

        Raises:
            OutputError: if the disk has less free space.
        """
        missing_bytes = num_bytes - (self.num_bytes - self.used_bytes)
        if missing_bytes > 0:
            self._files.append(_File(self._where(), missing_bytes))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor in this pool, with the shape, strides and type of another tensor.

        If the other tensor overlaps itself or has gaps, the new tensor is contiguous.

        Raises:
            OutputError: if the disk is full.
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
        """Return a copy of a tensor in this pool.

        Raises:
            OutputError: if the disk is full.
        """
        with torch.no_grad():
            return self.empty_like(tensor).copy_(tensor.detach())

    def know(self, tensor: Tensor) -> None:
        """Treat a fake tensor as part of this pool. In a dry run, it stands for a tensor that the pool would hold."""
        self._made.add(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor was created in this pool. A view shares the storage of its base."""
        return tensor in self._made

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedPool:
        """Return the pool itself, because deep copies of its tensors are in ordinary memory."""
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
    """A set of storages, to which a tensor belongs if its storage does. The set does not keep storages alive."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> None:
        """Add the storage of a tensor."""
        storage = tensor.untyped_storage()
        address, known = storage._cdata, self._known
        known[address] = weakref.ref(storage, lambda gone: known.pop(address) if known.get(address) is gone else None)

    def discard(self, tensor: Tensor) -> None:
        """Remove the storage of a tensor, if it is in the set."""
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._known


class _File:
    """One mapped file, with a list of its free ranges as ``(begin, end)`` in bytes, in ascending order."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = _rounded(num_bytes, mmap.PAGESIZE)
        self._map = _mapped_file(folder, self.num_bytes)
        self._free = [(0, self.num_bytes)]
        # A tensor can be freed at any time, even while `_free` is being changed, so its range is queued here first.
        self._returned: list[tuple[int, int]] = []

    @property
    def used_bytes(self) -> int:
        """The bytes of the file that tensors use."""
        self._collect()
        return self.num_bytes - sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> memoryview | None:
        """Return ``num_bytes`` of the file's memory; ``None`` if no free range is large enough.

        The memory becomes free again when the last reference to the result is gone.
        """
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
    """Return strides for a copy of a tensor, without gaps and overlaps.

    They are the strides of the tensor if it has neither, otherwise the contiguous strides of its shape.
    """
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
    try:
        return _unnamed(folder, num_bytes)
    except OSError as error:
        raise OutputError(
            f"cannot keep {format_bytes(num_bytes)} of the training in a file in {folder}: {error.strerror or error}; "
            f"free some space there, or set {SCRATCH_VARIABLE} to a folder on a disk with enough space"
        ) from error


def _unnamed(folder: Path, num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=folder, prefix="plimsoll-", buffering=0) as file:
        return _mapped(file, num_bytes)


def _mapped(file: IO[bytes], num_bytes: int) -> mmap.mmap:
    # Allocate before mapping: a full disk then raises here, instead of a SIGBUS in the middle of a kernel.
    os.posix_fallocate(file.fileno(), 0, num_bytes)  # also fills the holes of a sparse file
    return mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)


def scratch_folder() -> Path:
    """Return the folder for mapped files: ``PLIMSOLL_SCRATCH``, or a temporary folder on a disk.

    Raises:
        OutputError: if the given folder, or every default folder, does not exist or is in memory.
    """
    given = os.environ.get(SCRATCH_VARIABLE)
    candidates = [Path(given)] if given else [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for folder in candidates:
        if folder.is_dir() and _file_system_of(folder) not in _IN_MEMORY:
            return folder
    raise OutputError(
        f"cannot keep part of the training in a file in {' or '.join(map(str, candidates))}: it is not a folder, or "
        f"it is kept in memory (tmpfs) and would free nothing; set {SCRATCH_VARIABLE} to a folder on a disk"
    )


def _file_system_of(folder: Path) -> str:
    """Return the file system type, or ``unknown`` if the kernel does not report it; see proc_pid_mountinfo(5)."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    types = [mount.partition(" - ")[2].split()[0] for mount in mounts if mount.split()[2] == number]
    return types[0] if types else "unknown"


# -- one matrix per file -----------------------------------------------------------------------------------------------

Shape = tuple[int, int]


def create(path: Path, shape: Shape, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
    """Create a file that holds one matrix, filled by ``fill``. It gets its final name after ``fill`` has returned.

    The file has no header: rows follow one another, as ``numpy.memmap`` reads them.

    Args:
        path: the file to create.
        shape: the numbers of rows and columns.
        dtype: the type of the elements.
        fill: function that writes the values into the matrix.

    Raises:
        OutputError: if the file exists, or the disk is full.
    """
    if path.exists():
        raise OutputError(f"cannot create the table {path}: it exists; remove it, or give another path")
    part = path.with_name(f"{path.name}.part")
    try:
        with _opened(part, "w+b") as file:
            matrix = _matrix(lambda num_bytes: _mapped(file, num_bytes), shape, dtype, part)
        fill(matrix)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return matrix


def reopen(path: Path, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Map an existing matrix file. Writes to the matrix go to the file.

    Raises:
        OutputError: if the file cannot be opened for writing, or its size differs from the matrix.
    """
    with _opened(path, "r+b") as file:
        found_bytes, needed_bytes = os.fstat(file.fileno()).st_size, prod(shape) * dtype.itemsize
        if found_bytes != needed_bytes:
            raise OutputError(
                f"the file {path} has {found_bytes:,} bytes, but {shape[0]:,} rows of {shape[1]:,} {dtype} are "
                f"{needed_bytes:,}: give the shape and type that it was created with, or another path"
            )
        return _matrix(lambda num_bytes: _mapped(file, num_bytes), shape, dtype, path)


def unnamed(folder: Path, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return a matrix of zeros in a mapped file without a name.

    The file is deleted when the matrix is freed, however the process ends.

    Raises:
        OutputError: if the folder cannot be written to, or the disk is full.
    """
    return _matrix(lambda num_bytes: _unnamed(folder, num_bytes), shape, dtype, folder)


def _opened(path: Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise OutputError(
            f"cannot open the table {path} for writing: {error.strerror or error}; give a path that can be written to"
        ) from error


def _matrix(mapped: Callable[[int], mmap.mmap], shape: Shape, dtype: torch.dtype, place: Path) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    try:
        return torch.frombuffer(mapped(num_bytes), dtype=dtype).view(shape)
    except OSError as error:
        raise OutputError(
            f"cannot keep {shape[0]:,} rows of {shape[1]:,} {dtype} ({format_bytes(num_bytes)}) in {place}: "
            f"{error.strerror or error}; free some space there, or give a path on a disk with enough space"
        ) from error
