"""Which ops of a rehearsal a captured CUDA graph will replay: they cost no calls, and have memory of their own.

    with as_captured():
        loss.backward()

A trace keeps their rows (``Trace.captured``). In a run that nobody records it does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby


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
