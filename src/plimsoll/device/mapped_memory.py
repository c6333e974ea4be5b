"""Tensors whose memory is a file: the kernel keeps their pages in memory while it can, and writes them out otherwise.

    state = MappedPool().copy_of(state)
    table = create(path, (num_rows, 300), torch.float32, fill)

A limit on private memory (``RLIMIT_DATA``, ``RssAnon``) does not count the pages of a file mapped as shared, so this
is where a training on the CPU puts what its budget cannot hold. In a dry run, on fake tensors, a pool makes fake
tensors that a trace counts outside the device.

Does NOT cover other systems than Linux, sparse tensors, and two processes that make the same file.
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
_ALIGNMENT_BYTES = 64  # what torch's own CPU allocator gives: kernels may round otherwise on other addresses
_FIRST_FILE_BYTES = 16 << 20
_LARGEST_GROWTH_BYTES = 1 << 30
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class MappedPool:
    """Tensors in unnamed files, which grow as needed.

    They are gone as soon as the last tensor in them and the pool are, however the process ends.

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
        """Make sure that tensors of so many bytes in all can be made.

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
        """Make a tensor like another, with its values.

        Raises:
            OutputError: if the disk is full.
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
    try:
        return _unnamed(folder, num_bytes)
    except OSError as error:
        raise OutputError(
            f"cannot keep {format_bytes(num_bytes)} of the training in a file in {folder}: {error.strerror or error}; "
            f"free some space there, or set {SCRATCH_VARIABLE} to a folder on a disk that has it"
        ) from error


def _unnamed(folder: Path, num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=folder, prefix="plimsoll-", buffering=0) as file:
        return _mapped(file, num_bytes)


def _mapped(file: IO[bytes], num_bytes: int) -> mmap.mmap:
    # Before it is mapped: a full disk is an error here, and not a SIGBUS in the middle of a kernel.
    os.posix_fallocate(file.fileno(), 0, num_bytes)  # also of a file that was copied with holes
    return mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)


def scratch_folder() -> Path:
    """Return the folder for files that are mapped: ``PLIMSOLL_SCRATCH``, else a folder for temporary files on a disk.

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


# -- matrices in files of their own ------------------------------------------------------------------------------------

Shape = tuple[int, int]


def create(path: Path, shape: Shape, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
    """Make a file with a matrix in it, which ``fill`` writes to; under its name only once that has ended.

    The file holds nothing else, row after row, as ``numpy.memmap`` reads it.

    Raises:
        OutputError: if it exists, or the disk is full.
    """
    if path.exists():
        raise OutputError(f"cannot make the table {path}: it exists; remove it, or give another path")
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
    """Map the file of a matrix; what is written to the matrix is written to the file.

    Raises:
        OutputError: if it cannot be written to, or is not as large as the matrix.
    """
    with _opened(path, "r+b") as file:
        found_bytes, needed_bytes = os.fstat(file.fileno()).st_size, prod(shape) * dtype.itemsize
        if found_bytes != needed_bytes:
            raise OutputError(
                f"the file {path} has {found_bytes:,} bytes, but {shape[0]:,} rows of {shape[1]:,} {dtype} are "
                f"{needed_bytes:,}: give the size it was made with, or another path"
            )
        return _matrix(lambda num_bytes: _mapped(file, num_bytes), shape, dtype, path)


def unnamed(folder: Path, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Make a matrix of zeros in a file that is gone with it, however the process ends.

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
            f"{error.strerror or error}; free some space there, or give a path on a disk that has it"
        ) from error
