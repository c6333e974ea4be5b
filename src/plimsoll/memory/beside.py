"""Copies that run beside the computation, and who waits for them: noted by whoever records, without a recorder nothing.

    with copying_beside(to_device=True) as copied:
        target.copy_(source)
    ...
    copied.note_wait(by_processor=False)

A dry run has no streams and makes each copy at once. Noted here is which copies would overlap with later ops, and
where each is waited for: their predicted time follows from it (`plimsoll.planning.search.stream_timeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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
