"""SIGINT and SIGTERM as a request to stop after the step, not in the middle of it.

A second signal of the same kind stops at once, as Python would have done without this.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class StopRequest:
    """``signal_number`` is the signal that asked to stop, or ``None``."""

    signal_number: int | None = None


@contextmanager
def stop_on_signal(say: Callable[[], None] = lambda: None) -> Iterator[StopRequest]:
    """Collect the first SIGINT or SIGTERM into a request while the block runs; ``say`` tells of it if it can."""
    request = StopRequest()

    def note(signal_number: int, _frame: FrameType | None) -> None:
        request.signal_number = signal_number
        signal.signal(signal_number, before[signal.Signals(signal_number)])
        with suppress(MemoryError):
            say()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
