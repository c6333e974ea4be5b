"""Event record of the CUDA caching allocator: every block and segment that it allocates and frees.

The functions of torch are private (``torch.cuda.memory._record_memory_history``, ``._snapshot``). If they are missing,
nothing is recorded. The format is ``device_traces`` in torch 2.11 to 2.13. Recording takes time and host memory, and is
off by default. Does NOT contain allocations made before recording began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.cuda.memory

MOST_EVENTS = 1_000_000
"""Maximum number of events that torch records; it discards older events."""

_SIGNS = {"alloc": 1, "free_completed": -1}
_SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class AllocatorEvent(NamedTuple):
    """A block or segment that was allocated or freed at an address.

    ``delta_bytes`` is its size, negative if it was freed.
    """

    address: int
    delta_bytes: int
    is_segment: bool


class AllocatorRecord:
    """Events of the allocator, available when the block of `recorded` ends; ``None`` if torch cannot record them."""

    events: tuple[AllocatorEvent, ...] | None = None


@contextmanager
def recorded(index: int = 0) -> Iterator[AllocatorRecord]:
    """Record the events of one CUDA device's allocator during the block."""
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
    """Return the events of one device from a snapshot; ``None`` if the format is unknown.

    A freed block that another stream still uses counts until its free is completed.
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
