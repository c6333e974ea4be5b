"""A reader for snapshot files: the final segments and blocks, and the events that led to them.

These pickles are read: `torch.cuda.memory._dump_snapshot`, `torch.cuda.memory.memory_snapshot()` (segments only), and
torch's C++ writer, each optionally compressed by gzip. Snapshots of torch 2.0 have the frames of a block in its
``history``. Reading takes memory of one to three times the file size. Not handled: JSON, and snapshots of MPS or other
libraries.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from plimsoll.diagnose.snapshot.recording import OOM, Columns, EventRow, Recording, Site, is_size
from plimsoll.errors import InputError
from plimsoll.files.pickles import BrokenPickle, load_plain

_GZIP = b"\x1f\x8b"
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in (2, 3, 4, 5))
_MOST_DEVICES = 256
_MOST_BYTES = 1 << 63  # limit for the sum of all sizes
_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")


class Block(NamedTuple):
    """A contiguous part of a segment, which a tensor uses or which is free.

    Attributes:
        address: address of the block on the device.
        size_bytes: size of the block.
        asked_bytes: the size that was requested, before rounding.
        is_used: whether the block is in use.
        site: the place of its allocation in the code.
    """

    address: int
    size_bytes: int
    asked_bytes: int
    is_used: bool
    site: Site


@dataclass(frozen=True)
class Segment:
    """Contiguous memory that the allocator has reserved on a device.

    Attributes:
        device: index of the device.
        size_bytes: size of the segment.
        stream: the CUDA stream that may use the segment.
        is_private: whether the segment is in a private pool, which belongs to CUDA graphs or a ``MemPool``.
        blocks: the blocks into which the segment is divided."""

    device: int
    size_bytes: int
    stream: int
    is_private: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Snapshot:
    """The content of one snapshot file.

    Attributes:
        segments: segments of all devices.
        traces: for each device, the row numbers of its events in ``columns``, oldest first.
        columns: the events of all devices, as columns of numbers.
        sites: places of allocations in the code, to which ``columns`` refers by index.
        settings: allocator settings, such as ``expandable_segments``; empty if the file has none.
    """

    segments: tuple[Segment, ...]
    traces: tuple[list[EventRow], ...]
    columns: Columns
    sites: list[Site]
    settings: dict[str, Any]


def is_snapshot(path: Path) -> bool:
    """Return whether a file begins as a pickle, plain or in gzip. No text begins with these bytes."""
    with suppress(OSError, EOFError, zlib.error):
        with path.open("rb") as file:
            head = file.read(2)
        if head == _GZIP:
            with gzip.open(path) as file:
                head = file.read(2)
        return head in _PICKLES
    return False


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot from its file.

    Raises:
        InputError: if the file cannot be read, is not a snapshot, or contains anything but plain data.
    """
    try:
        with path.open("rb") as file:
            return snapshot_of(file, path.name)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror or error}): give a memory snapshot") from None


def snapshot_of(file: BinaryIO, name: str) -> Snapshot:
    """Read a snapshot from a seekable file; see `read_snapshot`."""
    recording = Recording()
    is_compressed = file.read(2) == _GZIP
    file.seek(0)
    try:
        root = load_plain(cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file, recording)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name} is damaged ({error}): write the snapshot again") from None
    except BrokenPickle as error:
        if error.is_torn:
            raise InputError(f"{name} {error}: write the snapshot again") from None
        raise InputError(
            f"{name} {error}: it was not opened; give a file that torch.cuda.memory._dump_snapshot wrote"
        ) from None
    if isinstance(root, list):
        root = {"segments": root}
    if not isinstance(root, dict) or "segments" not in root:
        found = [key[:40] for key in sorted(root)[:5]] if isinstance(root, dict) else type(root).__name__
        raise InputError(
            f"{name} is a pickle without the segments of a memory snapshot (it holds {found}): give a file that "
            "torch.cuda.memory._dump_snapshot wrote"
        )
    try:
        return _checked(root, recording)
    except _Odd as odd:
        raise InputError(
            f"{name} is not a known kind of memory snapshot ({odd}): write one with torch.cuda.memory._dump_snapshot"
        ) from None


class _Odd(Exception):
    """Raised if a file contains data that torch does not write in a snapshot."""


def _checked(root: dict[str, Any], recording: Recording) -> Snapshot:
    seen: set[int] = set()
    segments = tuple(_segment(one, recording, seen) for one in _list(root["segments"], seen))
    traces = tuple(_list(one, seen) for one in _list(root.get("device_traces", []), seen))
    if any(type(row) is not EventRow for trace in traces for row in trace):
        raise _Odd("an event has no action, size or address")
    if len(traces) > _MOST_DEVICES:
        raise _Odd(f"there are {len(traces)} devices")
    columns = recording.columns
    num_bytes = sum(size for size, action in zip(columns.sizes, columns.actions, strict=True) if action != OOM)
    if num_bytes + sum(segment.size_bytes for segment in segments) >= _MOST_BYTES:
        raise _Odd("sizes are negative or too large")
    settings: object = root.get("allocator_settings")
    return Snapshot(
        segments, traces, recording.columns, recording.sites, settings if isinstance(settings, dict) else {}
    )


def _list(value: object, seen: set[int]) -> list[Any]:
    """Check that a value is a list that was not checked before, and return it.

    A small file could otherwise refer to one list many times, and take as long to read as a huge file.
    """
    if not isinstance(value, list) or (value and id(value) in seen):
        raise _Odd("a list is missing, or used twice")
    seen.add(id(value))
    return value


def _segment(fields: object, recording: Recording, seen: set[int]) -> Segment:
    if not isinstance(fields, dict):
        raise _Odd("a segment is not a dict")
    size_bytes = _bytes_of(fields, "total_size")
    blocks = tuple(_blocks(fields, recording, seen))
    if sum(block.size_bytes for block in blocks) > size_bytes:
        raise _Odd("the blocks of a segment are larger than it is")
    device = _bytes_of(fields, "device", 0)
    if device >= _MOST_DEVICES:
        raise _Odd("a device has a number that is too large")
    pool = fields.get("segment_pool_id", (0, 0))
    stream = fields.get("stream", 0)
    return Segment(
        device=device,
        size_bytes=size_bytes,
        stream=stream if type(stream) is int else 0,
        is_private=isinstance(pool, tuple | list) and tuple(pool) != (0, 0),
        blocks=blocks,
    )


def _blocks(fields: dict[str, Any], recording: Recording, seen: set[int]) -> Iterator[Block]:
    address = _bytes_of(fields, "address", 0)
    for block in _list(fields.get("blocks"), seen):
        if not isinstance(block, dict) or block.get("state") not in _STATES:
            raise _Odd("a block has no state")
        size_bytes, is_used = _bytes_of(block, "size"), block["state"] == _STATES[0]
        last = _last_of_history(block)
        asked_bytes = _bytes_of(last, "real_size", _bytes_of(block, "requested_size", size_bytes)) if is_used else 0
        yield Block(
            address=_bytes_of(block, "address", address),
            size_bytes=size_bytes,
            asked_bytes=min(asked_bytes, size_bytes),
            is_used=is_used,
            site=recording.site_of(block.get("frames", last.get("frames"))),
        )
        address += size_bytes


def _last_of_history(block: dict[str, Any]) -> dict[str, Any]:
    """Return the newest allocation in the history of a block. Snapshots of torch up to 2.0 have such histories."""
    history = block.get("history")
    return history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}


def _bytes_of(fields: dict[str, Any], name: str, otherwise: int | None = None) -> int:
    value = fields.get(name, otherwise)
    if value is None or not is_size(value):
        raise _Odd(f"{name} is not a number of bytes, but a {type(value).__name__}")
    return cast(int, value)
