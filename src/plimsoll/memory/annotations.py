"""Annotations that running training code adds to ops: "replayed by a CUDA graph" or "copied asynchronously".

    with as_captured():
        loss.backward()
    with copying_beside(to_device=True) as copied:
        target.copy_(source)
    ...
    copied.note_wait(by_processor=False)

A dry run has no streams and performs each copy at once. The annotations record which copies would overlap with later
ops, and which op waits for each copy. `plimsoll.planning.search.stream_timeline` predicts step time from them. Ops of a
CUDA graph have no launch overhead, and allocate from a private pool. Without a recorder, annotations have no effect.
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
    """Mark the ops of the block, in this thread, as ops of a CUDA graph."""
    _DEPTH.value += 1
    try:
        yield
    finally:
        _DEPTH.value -= 1


def is_captured() -> bool:
    """Return whether this thread is inside `as_captured`."""
    return _DEPTH.value > 0


def stretches(are_captured: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the intervals of True values as ``(begin, end)``, end excluded.

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
    """Return, for each op of a trace, whether a CUDA graph replays it."""
    rows = np.zeros(len(trace.ops.name), dtype=bool)
    for begin, end in trace.captured:
        rows[begin:end] = True
    return rows


def private_storages(trace: Trace) -> set[int]:
    """Return the ids of the storages in the private pool of a CUDA graph, that is, storages that its ops allocate."""
    if not trace.captured:
        return set()
    born = np.asarray(trace.storages.born, dtype=np.int64)
    return set(np.flatnonzero(captured_rows(trace)[born]).tolist())


Copy = tuple[int, bool]
Wait = tuple[int, int, bool]


class Beside:
    """The asynchronous copies in the record of one `Recorder`, and the ops that wait for them.

    Args:
        last_row: returns the row of the last op in the record.

    Attributes:
        copies: ``(row, to_device)`` of each copy: the row of its op, and whether it copies to the device.
        waits: ``(row, copy_row, by_processor)`` of each wait. The op in ``row`` begins after the copy in ``copy_row``
            has finished. With ``by_processor``, the processor waits as well.
    """

    def __init__(self, last_row: Callable[[], int]) -> None:
        self.last_row = last_row
        self.copies: list[Copy] = []
        self.waits: list[Wait] = []

    def columns(self) -> dict[str, Any]:
        """Return the copies and waits as columns of a trace."""
        return {"copies": tuple(self.copies), "waits": tuple(self.waits)}

    def note_again(self, begin: int, num_times: int) -> None:
        """Record the copies and waits of the rows from ``begin`` on ``num_times`` more times."""
        num_rows = self.last_row() + 1 - begin
        copies = [one for one in self.copies if one[0] >= begin]
        waits = [one for one in self.waits if begin <= one[1]]
        for shift in range(num_rows, num_rows * (num_times + 1), num_rows):
            self.note_shifted(copies, waits, shift)

    def noted(self, begin_copy: int, begin_wait: int) -> tuple[list[Copy], list[Wait]]:
        """Return the copies from index ``begin_copy`` on, and the waits from index ``begin_wait`` on."""
        return self.copies[begin_copy:], self.waits[begin_wait:]

    def note_shifted(self, copies: list[Copy], waits: list[Wait], shift: int) -> None:
        """Record copies and waits once more, ``shift`` rows later."""
        self.copies += [(row + shift, to_device) for row, to_device in copies]
        self.waits += [(row + shift, copy + shift, by_processor) for row, copy, by_processor in waits]


class Copied:
    """The copies made in one block of `copying_beside`, for which later ops can wait."""

    def __init__(self, rows: list[tuple[Beside, int]]) -> None:
        self._rows = rows

    def note_wait(self, *, by_processor: bool) -> None:
        """Record that the next op waits for these copies; with ``by_processor``, the processor waits as well."""
        for beside, row in self._rows:
            beside.waits.append((beside.last_row() + 1, row, by_processor))


@contextmanager
def copying_beside(to_device: bool) -> Iterator[Copied]:
    """Mark the ops of the block as copies that overlap with later ops. Yield an object that records waits for them."""
    records = [getattr(mode, "beside", None) for mode in _get_current_dispatch_mode_stack()]
    begins = [(beside, beside.last_row() + 1) for beside in records if isinstance(beside, Beside)]
    rows: list[tuple[Beside, int]] = []
    yield Copied(rows)
    for beside, begin in begins:
        end = beside.last_row()
        beside.copies += [(row, to_device) for row in range(begin, end + 1)]
        rows.append((beside, end))
