"""SIGINT and SIGTERM as a request to stop after the step, not in the middle of it.

A second signal of the same kind stops at once, as Python would have done without this. The death of the
process that watches this one is a request as well, also where no signal tells of it (`plimsoll.processes.children`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class StopRequest:
    """What asks to stop: a signal that has arrived, or that ``parent``, which was this process's, is so no more."""

    received: int | None = None
    parent: int | None = None

    @property
    def signal_number(self) -> int | None:
        """The signal that asked to stop, or ``None``; SIGTERM where the parent is gone."""
        is_orphan = self.parent is not None and os.getppid() != self.parent
        return signal.SIGTERM if self.received is None and is_orphan else self.received


@contextmanager
def stop_on_signal(say: Callable[[], None] = lambda: None, parent: int | None = None) -> Iterator[StopRequest]:
    """Collect the first SIGINT or SIGTERM into a request while the block runs.

    Args:
        say: tells of it if it can.
        parent: the process that watches this one, whose death asks to stop as well.
    """
    request = StopRequest(parent=parent)

    def note(signal_number: int, _frame: FrameType | None) -> None:
        request.received = signal_number
        signal.signal(signal_number, before[signal.Signals(signal_number)])
        with suppress(MemoryError, OSError):  # there may be nobody left to tell
            say()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
