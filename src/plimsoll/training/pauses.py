"""Pauses before a step that ran out of memory with the last fallback is retried unchanged.

A pause helps only if an earlier step has fit with the same fallback. Then another program has taken the memory and may
free it. Does NOT free memory, because the step has done that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from plimsoll.training.run_directory import RunDirectory

_SECONDS = (1.0, 4.0, 16.0, 64.0)
_ASK_SECONDS = 0.1  # interval at which a pause checks for a request to stop


@dataclass(slots=True)
class Pauses:
    """The pauses before retries of one step; they become longer (1, 4, 16 and 64 seconds)."""

    num_taken: int = 0

    def next_seconds(self, directory: RunDirectory, fallback: int) -> float | None:
        """Return the length of the next pause.

        Args:
            directory: the run directory.
            fallback: number of the current fallback.

        Returns:
            Seconds; ``None`` if all pauses were used, or no step has fit with this fallback.
        """
        if self.num_taken == len(_SECONDS):
            return None
        return _SECONDS[self.num_taken] if directory.has_fit(fallback) else None

    def take(self, seconds: float, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait for ``seconds``, or until ``is_asked_to_stop()`` returns true."""
        self.num_taken += 1
        until_seconds = time.monotonic() + seconds
        while (left_seconds := until_seconds - time.monotonic()) > 0 and not is_asked_to_stop():
            time.sleep(min(left_seconds, _ASK_SECONDS))
