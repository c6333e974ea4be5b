"""What a run says of its ops to whoever records them: that a CUDA graph replays them, or that they are copies.

    with as_captured():
        loss.backward()
    with copying_beside(to_device=True) as copied:
        target.copy_(source)
    ...
    copied.note_wait(by_processor=False)

A dry run has no streams and makes each copy at once. Noted is which copies would overlap with later ops and where each
is waited for: their predicted time follows from it (`plimsoll.planning.search.stream_timeline`). Ops of a graph cost no
calls and have memory of their own. In a run that nobody records this does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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


Copy = tuple[int, bool]
Wait = tuple[int, int, bool]


class Beside:
    """What one record has of such copies.

    Args:
        last_row: asked for the row of the op that was noted last.

    Attributes:
        copies: ``(row, whether it is to the device)`` of each copy.
        waits: ``(row, row of a copy, whether the processor waits, too)``: the first begins after the second has ended.
    """

    def __init__(self, last_row: Callable[[], int]) -> None:
        self.last_row = last_row
        self.copies: list[Copy] = []
        self.waits: list[Wait] = []

    def columns(self) -> dict[str, Any]:
        """What a trace has of them."""
        return {"copies": tuple(self.copies), "waits": tuple(self.waits)}

    def note_again(self, begin: int, num_times: int) -> None:
        """Note what belongs to the last rows, from one on, so many times more."""
        num_rows = self.last_row() + 1 - begin
        copies = [one for one in self.copies if one[0] >= begin]
        waits = [one for one in self.waits if begin <= one[1]]
        for shift in range(num_rows, num_rows * (num_times + 1), num_rows):
            self.note_shifted(copies, waits, shift)

    def noted(self, begin_copy: int, begin_wait: int) -> tuple[list[Copy], list[Wait]]:
        """Return the copies and waits since so many were noted."""
        return self.copies[begin_copy:], self.waits[begin_wait:]

    def note_shifted(self, copies: list[Copy], waits: list[Wait], shift: int) -> None:
        """Note copies and waits once more, so many rows later."""
        self.copies += [(row + shift, to_device) for row, to_device in copies]
        self.waits += [(row + shift, copy + shift, by_processor) for row, copy, by_processor in waits]


class Copied:
    """The last of some copies, in each record that is being made."""

    def __init__(self, rows: list[tuple[Beside, int]]) -> None:
        self._rows = rows

    def note_wait(self, *, by_processor: bool) -> None:
        """Say that what comes next waits for the copies: on the device, or also the processor."""
        for beside, row in self._rows:
            beside.waits.append((beside.last_row() + 1, row, by_processor))


@contextmanager
def copying_beside(to_device: bool) -> Iterator[Copied]:
    """Let the ops of the block be noted as copies that are on their way beside what follows."""
    records = [getattr(mode, "beside", None) for mode in _get_current_dispatch_mode_stack()]
    begins = [(beside, beside.last_row() + 1) for beside in records if isinstance(beside, Beside)]
    rows: list[tuple[Beside, int]] = []
    yield Copied(rows)
    for beside, begin in begins:
        end = beside.last_row()
        beside.copies += [(row, to_device) for row in range(begin, end + 1)]
        rows.append((beside, end))
