"""Pauses before a step that ran out of memory is tried again as it is, where no further fallback is left.

Worth it only where a step of this run has fit with the same fallback: then something else has the memory, and may let
it go. Does NOT free anything: the step has done that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from plimsoll.training.run_directory import RunDirectory

_SECONDS = (1.0, 4.0, 16.0, 64.0)
_ASK_SECONDS = 0.1  # how often a pause asks whether it is to stop


@dataclass(slots=True)
class Pauses:
    """The pauses of one step."""

    num_taken: int = 0

    def next_seconds(self, directory: RunDirectory, fallback: int) -> float | None:
        """Return how long the next pause of a step with this fallback is; ``None``: it is of no use."""
        if self.num_taken == len(_SECONDS):
            return None
        return _SECONDS[self.num_taken] if directory.has_fit(fallback) else None

    def take(self, seconds: float, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait, unless somebody asks to stop."""
        self.num_taken += 1
        until_seconds = time.monotonic() + seconds
        while (left_seconds := until_seconds - time.monotonic()) > 0 and not is_asked_to_stop():
            time.sleep(min(left_seconds, _ASK_SECONDS))
