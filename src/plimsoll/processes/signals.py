"""SIGINT and SIGTERM as requests to stop after the current step.

A second signal of the same kind gets Python's default treatment and stops at once. The death of the supervisor is also
a request to stop, even on systems that send no signal for it (`plimsoll.processes.children`).
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
    """A request to stop, made by a signal or by the death of ``parent``, the parent process of this process."""

    received: int | None = None
    parent: int | None = None

    @property
    def signal_number(self) -> int | None:
        """The number of the signal that requested the stop; SIGTERM if the parent died; ``None`` without a request."""
        is_orphan = self.parent is not None and os.getppid() != self.parent
        return signal.SIGTERM if self.received is None and is_orphan else self.received


@contextmanager
def stop_on_signal(say: Callable[[], None] = lambda: None, parent: int | None = None) -> Iterator[StopRequest]:
    """Collect the first SIGINT or SIGTERM into a request while the block runs.

    Args:
        say: a function that tells the user that the signal was received.
        parent: the process ID of the supervisor. Its death counts as a request to stop.
    """
    request = StopRequest(parent=parent)

    def note(signal_number: int, _frame: FrameType | None) -> None:
        request.received = signal_number
        signal.signal(signal_number, before[signal.Signals(signal_number)])
        with suppress(MemoryError, OSError):  # the terminal may be closed
            say()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
