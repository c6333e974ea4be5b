"""The caching allocator's own record of a CUDA training: every block and segment it gave out and took back.

The names of torch for it are private (``torch.cuda.memory._record_memory_history``, ``._snapshot``): they are used here
only, and where this torch has not got them there is no record. The format is that of torch 2.11 to 2.13, of which
``device_traces`` is read. Recording costs time and host memory, so it is asked for, never the default. It does NOT hold
what was allocated before it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.cuda.memory

MOST_EVENTS = 1_000_000
"""torch keeps the last ones."""

_SIGNS = {"alloc": 1, "free_completed": -1}
_SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class AllocatorEvent(NamedTuple):
    """A block or a segment given out (positive) or taken back (negative) at an address."""

    address: int
    delta_bytes: int
    is_segment: bool


class AllocatorRecord:
    """What the allocator did; filled when the block of `recorded` ends, ``None`` where torch cannot tell."""

    events: tuple[AllocatorEvent, ...] | None = None


@contextmanager
def recorded(index: int = 0) -> Iterator[AllocatorRecord]:
    """Have the allocator of one CUDA device record what happens in the block."""
    record = AllocatorRecord()
    private = vars(torch.cuda.memory)
    start, snapshot = private.get("_record_memory_history"), private.get("_snapshot")
    if start is None or snapshot is None or not torch.cuda.is_available():
        yield record
        return
    start("all", context=None, max_entries=MOST_EVENTS, device=index)
    try:
        yield record
    finally:
        record.events = events_of(snapshot(index), index)
        start(None, device=index)


def events_of(snapshot: Mapping[str, Any], index: int = 0) -> tuple[AllocatorEvent, ...] | None:
    """Read the events of one device from a snapshot, ``None`` if it has none in a form that is known.

    A block that was asked back but is still used by another stream counts until its free is completed.
    """
    traces = snapshot.get("device_traces")
    if not isinstance(traces, list) or index >= len(traces):
        return None
    events = []
    for entry in traces[index]:
        signs = _SIGNS if entry.get("action") in _SIGNS else _SEGMENT_SIGNS
        sign = signs.get(entry.get("action"))
        if sign is not None:
            events.append(AllocatorEvent(entry["addr"], sign * entry["size"], signs is _SEGMENT_SIGNS))
    return tuple(events)
