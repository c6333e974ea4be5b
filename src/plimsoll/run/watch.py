"""Look at a process again and again, and say before a limit is reached that it will be.

The rate is the median of the slopes between all pairs of the last 30 samples (Theil-Sen), from 8 on. A warning begins
where the limit is under 60 s away and at least half used, and ends where it is over 120 s away, so that it does not
flap. Does NOT tell growth that will stop from growth that will not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from statistics import median

from plimsoll.device.watched import family_of, lines_of
from plimsoll.errors import InputError
from plimsoll.records.watch import Line, WatchSample

_FEWEST_POINTS, _MOST_POINTS = 8, 30
_WARN_SECONDS, _CALM_SECONDS = 60.0, 120.0
_LEAST_USED_SHARE = 0.5


class Forecast:
    """When one limit will be reached; it is told of every sample, in order."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=_MOST_POINTS)
        self._is_warning = False

    def seconds_left(self, seconds: float, line: Line) -> float | None:
        """Add what is used now, and return the seconds until the limit; ``None`` where nothing warns."""
        self._points.append((seconds, line.used_bytes))
        if len(self._points) < _FEWEST_POINTS:
            return None
        rate = median((later[1] - one[1]) / (later[0] - one[0]) for one, later in combinations(self._points, 2))
        left = max(0, line.limit_bytes - line.used_bytes) / rate if rate > 0 else float("inf")
        near = _CALM_SECONDS if self._is_warning else _WARN_SECONDS
        self._is_warning = left <= near and line.used_bytes >= _LEAST_USED_SHARE * line.limit_bytes
        return left if self._is_warning else None


def watch(pid: int, every_seconds: float, num_samples: int | None) -> Iterator[WatchSample]:
    """Look at a process and what it started until it ends, or so many times.

    Raises:
        InputError: if there is no such process, or it is another user's.
    """
    forecasts: dict[str, Forecast] = {}
    started = time.monotonic()
    number = 0
    while num_samples is None or number < num_samples:
        processes, seconds = family_of(pid), time.monotonic() - started
        if not processes:
            if number == 0:
                raise InputError(f"there is no running process {pid}: give the number of one, as `ps` shows it")
            return
        lines = tuple(
            line.model_copy(
                update={"seconds_left": forecasts.setdefault(line.name, Forecast()).seconds_left(seconds, line)}
            )
            for line in lines_of(processes)
        )
        yield WatchSample(seconds=seconds, processes=processes, lines=lines)
        number += 1
        if number != num_samples:
            time.sleep(every_seconds)
