"""Tensors whose memory is a file, mapped as shared: neither private memory nor ``RLIMIT_DATA`` counts them.

The kernel keeps their pages while there is room and writes them to the disk where not. Disk blocks are reserved before
they are mapped, so a full disk is an error here and not a SIGBUS in the middle of a kernel. A named file holds the
elements and nothing else, row after row, as ``numpy.memmap`` reads it.

Does NOT cover other systems than Linux, two processes that make the same file, and folders kept in memory (tmpfs),
which work and free nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from plimsoll.errors import OutputError
from plimsoll.records.units import format_bytes

Shape = tuple[int, int]


def create(path: Path, shape: Shape, dtype: torch.dtype, fill: Callable[[Tensor], object]) -> Tensor:
    """Make a file with a tensor in it, which ``fill`` writes to; under its name only once that has ended.

    Raises:
        OutputError: if it exists, or the disk has no room.
    """
    if path.exists():
        raise OutputError(f"cannot make the table {path}: it exists; remove it, or give another path")
    part = path.with_name(f"{path.name}.part")
    try:
        with _opened(part, "w+b") as file:
            tensor = _mapped(file, shape, dtype, part)
        fill(tensor)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return tensor


def reopen(path: Path, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Map the file of a tensor; what is written to the tensor is written to the file.

    Raises:
        OutputError: if it cannot be written to, or is not as large as the tensor.
    """
    with _opened(path, "r+b") as file:
        found_bytes, needed_bytes = os.fstat(file.fileno()).st_size, _num_bytes(shape, dtype)
        if found_bytes != needed_bytes:
            raise OutputError(
                f"the file {path} has {found_bytes:,} bytes, but {shape[0]:,} rows of {shape[1]:,} {dtype} are "
                f"{needed_bytes:,}: give the size it was made with, or another path"
            )
        return _mapped(file, shape, dtype, path)


def unnamed(folder: Path, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Make a tensor of zeros in a file that is gone with the tensor, however the process ends.

    Raises:
        OutputError: if the folder cannot be written to, or the disk has no room.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="plimsoll-", buffering=0) as file:
            return _mapped(file, shape, dtype, folder)
    except OSError as error:
        raise _no_room(folder, shape, dtype, error) from error


def _opened(path: Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise OutputError(
            f"cannot open the table {path} for writing: {error.strerror or error}; give a path that can be written to"
        ) from error


def _mapped(file: IO[bytes], shape: Shape, dtype: torch.dtype, place: Path) -> Tensor:
    num_bytes = _num_bytes(shape, dtype)
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # also of a file that was copied with holes
        memory = mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)
    except OSError as error:
        raise _no_room(place, shape, dtype, error) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _num_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _no_room(place: Path, shape: Shape, dtype: torch.dtype, error: OSError) -> OutputError:
    return OutputError(
        f"cannot keep {shape[0]:,} rows of {shape[1]:,} {dtype} ({format_bytes(_num_bytes(shape, dtype))}) in "
        f"{place}: {error.strerror or error}; free some space there, or give a path on a disk that has it"
    )
