"""Tensors of a weight file, each read directly into its final memory, or mapped from the file.

Reading takes only the memory of the tensor. If the type or device changes, it also takes a block of `_BLOCK_BYTES`.

A mapped tensor is file memory, whose pages the kernel drops when memory is short. The file determines its alignment, so
kernels may round sums differently than for memory from torch, which is aligned to 64 bytes.

Does NOT cover files with another byte order, or files that change while they are read or mapped.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plimsoll.device.cpu.pages import copied_on_write
from plimsoll.device.off_device import outside_the_device
from plimsoll.errors import WeightsError
from plimsoll.records.units import format_bytes
from plimsoll.weights.loading.written import note_mapped

_BLOCK_BYTES = 8 << 20
"""Bytes per read. Progress is reported and Ctrl-C handled between reads; larger blocks are not faster."""

Report = Callable[[int], None]
"""A function that is called with the number of bytes of each block that was read."""


def _unheard(num_bytes: int) -> None:
    """Ignore the number of bytes that were read: the default for callers that show no progress."""


class WeightFile:
    """A weight file that can be read at any offset; it is mapped once for all mapped tensors.

    Args:
        path: the file.
        num_bytes: the size of the file when its header was read.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._maps: weakref.WeakValueDictionary[bool, mmap.mmap] = weakref.WeakValueDictionary()

    def mapped(self, is_read_only: bool) -> mmap.mmap:
        """Return the mapped file. It stays mapped until the last reference to it is deleted.

        Raises:
            WeightsError: if the file cannot be opened, or a limit on this process refuses the mapping.
        """
        known = self._maps.get(is_read_only)
        if known is None:
            with _opened(self.path) as descriptor:
                known = self._maps[is_read_only] = _map(descriptor, self.path, is_read_only)
        return known

    def read_into(self, target: Tensor, offset: int, report: Report = _unheard) -> None:
        """Fill a contiguous CPU tensor with bytes of the file, starting at ``offset``.

        Raises:
            WeightsError: if the file is too short or cannot be read.
        """
        if target.numel() == 0:
            return
        bytes_of_target: Any = target.detach().flatten().view(torch.uint8).numpy()
        memory = memoryview(bytes_of_target)
        with _opened(self.path) as descriptor:
            done_bytes = 0
            while done_bytes < len(memory):
                read_bytes = self._read(descriptor, memory[done_bytes : done_bytes + _BLOCK_BYTES], offset + done_bytes)
                done_bytes += read_bytes
                report(read_bytes)

    def _read(self, descriptor: int, memory: memoryview, offset: int) -> int:
        try:
            read_bytes = os.preadv(descriptor, [memory], offset)
        except OSError as error:
            raise WeightsError(
                f"cannot read {self.path} at byte {offset} ({error.strerror}): download it again"
            ) from error
        if read_bytes == 0:
            raise WeightsError(
                f"{self.path} ends at byte {offset}, but had {self.num_bytes} bytes when it was opened: wait until it "
                "is written, then load it again"
            )
        return read_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """The type, shape and position of a tensor in a weight file.

    Attributes:
        name: name of the tensor in the file.
        dtype: data type of the tensor in the file.
        shape: shape of the tensor.
        source: the file.
        offset: offset of the tensor's first byte in the file.
        num_bytes: bytes from the tensor's first to its last byte.
        strides: strides in elements if the tensor is not contiguous in the file; else ``None``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: WeightFile
    offset: int
    num_bytes: int
    strides: tuple[int, ...] | None = None

    @property
    def file(self) -> Path:
        """The path of the file."""
        return self.source.path

    @property
    def can_be_mapped(self) -> bool:
        """True if the tensor's first byte is aligned for its data type."""
        return self.offset % self.dtype.itemsize == 0

    def has_bytes_of(self, other: Entry) -> bool:
        """Return whether both entries describe the same bytes of a file, as tied weights do in ``torch.save`` files."""
        same = (self.file, self.offset, self.shape, self.strides) == (
            other.file,
            other.offset,
            other.shape,
            other.strides,
        )
        return same and self.dtype == other.dtype

    def rows(self, begin: int, end: int) -> Entry:
        """Return the entry of rows ``begin`` to ``end`` (exclusive) in the first dimension of a contiguous tensor."""
        assert self.strides is None, self
        assert 0 <= begin <= end <= self.shape[0], (self, begin, end)
        row_bytes = num_bytes_of(self.shape[1:], self.dtype)
        shape, offset = (end - begin, *self.shape[1:]), self.offset + begin * row_bytes
        return Entry(self.name, self.dtype, shape, self.source, offset, (end - begin) * row_bytes)

    def read(self, report: Report = _unheard) -> Tensor:
        """Return a copy of the tensor in new memory.

        Raises:
            WeightsError: if the file cannot be read.
        """
        if self.strides is None:
            made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            self.source.read_into(made, self.offset, report)
            return made
        span = torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype, device="cpu")
        self.source.read_into(span, self.offset, report)
        return span.as_strided(self.shape, self.strides)

    def read_into(self, target: Tensor, report: Report = _unheard) -> None:
        """Fill a tensor of the same shape, with any type and on any device.

        Raises:
            WeightsError: if the file cannot be read.
        """
        assert tuple(target.shape) == self.shape, (target.shape, self.shape)
        with torch.no_grad():
            if self.strides is not None or not target.is_contiguous():
                target.copy_(self.read(report))
            elif target.device.type == "cpu" and target.dtype == self.dtype:
                self.source.read_into(target, self.offset, report)
            else:
                self._read_in_blocks(target.detach().flatten(), report)

    def mapped(self, is_read_only: bool = False) -> Tensor:
        """Return the tensor as a mapping of the file.

        By default it is copy-on-write: written pages become private memory, and the file does not change.
        ``RLIMIT_DATA`` counts the whole mapping; a Plimsoll limit counts only written pages
        (`plimsoll.device.cpu.data_limit`).

        Args:
            is_read_only: map read-only, which no limit counts. A write ends the process with SIGSEGV, so use it only
                for weights that no other code can access.

        Raises:
            WeightsError: if its first byte is not aligned for its type, or the file cannot be mapped.
        """
        if not self.can_be_mapped:
            raise WeightsError(
                f"`{self.name}` begins at byte {self.offset} of {self.file}, which is not aligned for {self.dtype} and "
                "cannot be mapped: use place memory, or save the checkpoint again with `save_pretrained`"
            )
        count = self.num_bytes // self.dtype.itemsize
        with outside_the_device(), torch.no_grad():
            if count == 0:
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            with warnings.catch_warnings():
                # A read-only mapping is intended.
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                memory = self.source.mapped(is_read_only)
                flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
            if not is_read_only:
                note_mapped(flat)
            return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)

    def _read_in_blocks(self, flat: Tensor, report: Report) -> None:
        """Read into a tensor of another type or device, with only one block in host memory at a time."""
        size_bytes = self.dtype.itemsize
        step = max(1, _BLOCK_BYTES // size_bytes)
        block = _block(min(step, flat.numel()), self.dtype, flat.device.type == "cuda")
        for begin in range(0, flat.numel(), step):
            part = block[: min(step, flat.numel() - begin)]
            self.source.read_into(part, self.offset + begin * size_bytes, report)
            flat[begin : begin + len(part)].copy_(part)  # blocks until the copy is complete


def _map(descriptor: int, path: Path, is_read_only: bool) -> mmap.mmap:
    """Map a whole file. A read-only shared mapping does not count against RLIMIT_DATA."""
    if is_read_only:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    try:
        return copied_on_write(descriptor)
    except OSError as error:
        raise WeightsError(
            f"cannot map {path}, {format_bytes(os.fstat(descriptor).st_size)}, as writable memory "
            f"({error.strerror}): a limit on this process (ulimit -d, ulimit -v) counts all of it; raise it, or use "
            "place read-only, which ulimit -d does not count (then nothing may write to the weights)"
        ) from None


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor with this shape and type."""
    return prod(shape) * dtype.itemsize


def _block(count: int, dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Return memory for ``count`` elements, pinned or in a separate mapping.

    It is not from malloc: glibc keeps larger freed blocks after a block of this size has been freed.
    """
    if is_pinned or count == 0:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=is_pinned)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading and yield its descriptor."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"cannot open {path}: {error.strerror}; give a folder whose files can be read") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
