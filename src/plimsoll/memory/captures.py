"""Which ops of a dry run a captured CUDA graph will replay: they cost no calls, and have memory of their own.

    with as_captured():
        loss.backward()

A trace keeps their rows (``Trace.captured``). In a run that nobody records it does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from plimsoll.records.trace import Trace

Column = NDArray[np.bool_]


class _Depth(threading.local):
    value = 0


_DEPTH = _Depth()


@contextmanager
def as_captured() -> Iterator[None]:
    """Let the ops of the block, in this thread, count as those of a graph."""
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


def is_captured() -> bool:
    """Whether this thread is in such a block."""
    return _DEPTH.value > 0


def stretches(are_captured: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the rows of which that is so, as where each stretch of them begins and where it has ended.

    >>> stretches([False, True, True, False, True])
    ((1, 3), (4, 5))
    """
    found, row = list[tuple[int, int]](), 0
    for is_one, rows in groupby(are_captured):
        end = row + len(list(rows))
        if is_one:
            found.append((row, end))
        row = end
    return tuple(found)


def captured_rows(trace: Trace) -> Column:
    """Say of each op of a trace whether a graph replays it."""
    rows = np.zeros(len(trace.ops.name), dtype=bool)
    for begin, end in trace.captured:
        rows[begin:end] = True
    return rows


def private_storages(trace: Trace) -> set[int]:
    """Return the storages that are in the pool of a graph: those that its ops allocate."""
    if not trace.captured:
        return set()
    born = np.asarray(trace.storages.born, dtype=np.int64)
    return set(np.flatnonzero(captured_rows(trace)[born]).tolist())
