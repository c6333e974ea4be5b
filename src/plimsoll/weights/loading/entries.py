"""One tensor of a file of weights: read straight into the memory it is to stay in, or mapped from the file.

Reading takes no memory but the tensor itself; where the type or the device changes, a block of `_BLOCK_BYTES` besides.
A mapped tensor is memory of the file, whose pages the kernel drops when memory is short. Its address is as the file has
it, so a kernel may round a sum otherwise than on memory that torch allocated (torch aligns to 64 bytes).

It does NOT cover files of another byte order, and says nothing of a file that changes while it is read or mapped.
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
"""Read at once: progress is shown and Ctrl-C heard in between; larger blocks are no faster."""

Report = Callable[[int], None]
"""Told of each block how many bytes were read."""


def _unheard(num_bytes: int) -> None:
    """Show nothing."""


class WeightFile:
    """A file of weights: read at any place, mapped once for all tensors that are mapped from it.

    Args:
        path: the file.
        num_bytes: how long it was when its header was read.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._maps: weakref.WeakValueDictionary[bool, mmap.mmap] = weakref.WeakValueDictionary()

    def mapped(self, is_read_only: bool) -> mmap.mmap:
        """Return the file as memory; it stays mapped as long as something refers to it.

        Raises:
            WeightsError: if the file cannot be opened, or a limit on this process refuses the mapping.
        """
        known = self._maps.get(is_read_only)
        if known is None:
            with _opened(self.path) as descriptor:
                known = self._maps[is_read_only] = _map(descriptor, self.path, is_read_only)
        return known

    def read_into(self, target: Tensor, offset: int, report: Report = _unheard) -> None:
        """Fill a contiguous tensor on the CPU with bytes of the file.

        Raises:
            WeightsError: if the file ends before, or cannot be read.
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
    """Where a tensor is in a file of weights.

    Attributes:
        name: as the file has it.
        dtype: as it is stored.
        shape: of the tensor.
        source: the file.
        offset: of its first byte in the file.
        num_bytes: from its first to its last byte.
        strides: in elements, where the tensor is not stored in the order of its elements; else ``None``.
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
        """Whether its first byte is where its type may begin."""
        return self.offset % self.dtype.itemsize == 0

    def has_bytes_of(self, other: Entry) -> bool:
        """Whether both are the same bytes of one file, as tied weights are in files of ``torch.save``."""
        same = (self.file, self.offset, self.shape, self.strides) == (
            other.file,
            other.offset,
            other.shape,
            other.strides,
        )
        return same and self.dtype == other.dtype

    def rows(self, begin: int, end: int) -> Entry:
        """Return where some rows are, by the first dimension, of a tensor that is stored in order."""
        assert self.strides is None, self
        assert 0 <= begin <= end <= self.shape[0], (self, begin, end)
        row_bytes = num_bytes_of(self.shape[1:], self.dtype)
        shape, offset = (end - begin, *self.shape[1:]), self.offset + begin * row_bytes
        return Entry(self.name, self.dtype, shape, self.source, offset, (end - begin) * row_bytes)

    def read(self, report: Report = _unheard) -> Tensor:
        """Return the tensor, in memory of its own.

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
        """Fill a tensor of the same shape, of any type and on any device.

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
        """Return the tensor as memory of the file.

        By default copy on write: what is written gets pages of its own, which are private memory from then on, and the
        file stays as it is. ``RLIMIT_DATA`` counts such a mapping whole; a limit of ours counts of it what was written
        (`plimsoll.device.cpu.data_limit`).

        Args:
            is_read_only: writing into it ends the process with SIGSEGV, and no limit counts it. For weights that nobody
                but this package has in hands.

        Raises:
            WeightsError: if its first byte is where its type cannot begin, or the file cannot be mapped.
        """
        if not self.can_be_mapped:
            raise WeightsError(
                f"`{self.name}` begins at byte {self.offset} of {self.file}, which no tensor of {self.dtype} can be "
                "mapped from: use place memory, or save the checkpoint again with `save_pretrained`"
            )
        count = self.num_bytes // self.dtype.itemsize
        with outside_the_device(), torch.no_grad():
            if count == 0:
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            with warnings.catch_warnings():
                # That the memory cannot be written is what is wanted.
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                memory = self.source.mapped(is_read_only)
                flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
            if not is_read_only:
                note_mapped(flat)
            return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)

    def _read_in_blocks(self, flat: Tensor, report: Report) -> None:
        """Read into another type or onto another device; nothing but a block is ever on the host."""
        size_bytes = self.dtype.itemsize
        step = max(1, _BLOCK_BYTES // size_bytes)
        block = _block(min(step, flat.numel()), self.dtype, flat.device.type == "cuda")
        for begin in range(0, flat.numel(), step):
            part = block[: min(step, flat.numel() - begin)]
            self.source.read_into(part, self.offset + begin * size_bytes, report)
            flat[begin : begin + len(part)].copy_(part)  # waits until it is there


def _map(descriptor: int, path: Path, is_read_only: bool) -> mmap.mmap:
    """Map a whole file; RLIMIT_DATA does not count what is both MAP_SHARED and PROT_READ."""
    if is_read_only:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    try:
        return copied_on_write(descriptor)
    except OSError as error:
        raise WeightsError(
            f"cannot map {path}, {format_bytes(os.fstat(descriptor).st_size)}, as memory that can be written "
            f"({error.strerror}): a limit on this process (ulimit -d, ulimit -v) counts all of it; raise it, or use "
            "place read-only, which ulimit -d does not count and nothing may write to"
        ) from None


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    return prod(shape) * dtype.itemsize


def _block(count: int, dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Memory for a block, which is given back at once: freed by malloc, it would teach it to keep such blocks."""
    if is_pinned or count == 0:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=is_pinned)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a file, for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"cannot open {path}: {error.strerror}; give a folder whose files can be read") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
