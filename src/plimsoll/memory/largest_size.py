"""Which size fits: found with a handful of traces, and verified by one at the answer.

Memory grows nearly in proportion to a batch, and with the square of a sequence at worst, in steps (an allocator takes
segments, a kernel changes at some size). So two traces give a line, or one of which it is known what grows in it, the
line gives the next size to try, and every trace narrows the bracket between a size that fits and one that does not,
until the two are neighbours or as near as was asked. Where lines narrow it too slowly, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_TRACES = 16  # a line takes 3 to 5, stairs and squares up to 15


@dataclass(frozen=True)
class Found(Generic[T]):
    """The largest size that fits with what was said of it; ``None`` if not even the smallest does."""

    value: int | None
    said: T | None
    is_bound: bool
    num_traces: int


def largest_that_fits(
    try_size: Callable[[int], tuple[int, bool, T]],
    start: int,
    most: int,
    precision: float = 0.005,
    growing_bytes: Callable[[T], int] = lambda said: 0,
    *,
    suppose: Callable[[int], None] = lambda size: None,
) -> Found[T]:
    """Find the largest size from 1 to ``most`` that fits.

    Args:
        try_size: ``size -> (bytes beyond the limit, whether it fits, what is to be said of it)``; the bytes are
            negative where there is memory left.
        start: where to begin.
        most: the largest size to try.
        precision: how near, as a share of the size, the answer may be below the first size that does not fit.
        growing_bytes: what of the first size's bytes grows with the size, 0 where that is not known.
        suppose: told, before the size is tried that the first line says, of the one that is probably tried later.
    """
    beyond_bytes: dict[int, int] = {}
    best: T | None = None
    low, high = 0, most + 1  # the largest size known to fit, the smallest known not to
    num_slow = 0  # traces in a row that did not halve what is between them
    size = max(1, min(start, most))
    while len(beyond_bytes) < _MOST_TRACES:
        between = high - low
        beyond_bytes[size], fits, said = try_size(size)
        if fits:
            low, best = size, said
        else:
            high = size
        step = max(1, int(precision * low))
        if high - low <= step:
            break
        num_slow = num_slow + 1 if 2 * (high - low) > between else 0
        growing = growing_bytes(said) if len(beyond_bytes) == 1 else 0
        if growing > 0:
            size, num_slow = round(size * (1 - beyond_bytes[size] / growing)), -1  # the first line goes through this
            if low + 1 < size < high:
                suppose(size - 1)  # the line leaves out what lies between, so that its size is a little too large
        else:
            size = _next_to_try(beyond_bytes, low, high, num_slow)
        size = min(max(size, low + step), high - 1)
    return Found(low or None, best, high > most, len(beyond_bytes))


def _next_to_try(beyond_bytes: dict[int, int], low: int, high: int, num_slow: int) -> int:
    """Where a line crosses the limit; a size between, the double or the half where lines do not get on."""
    sizes = sorted(beyond_bytes)
    if low in beyond_bytes and high in beyond_bytes:
        most_slow = 1 if high > 2 * low else 2  # a line that hits takes two: its crossing, and the size after it
        line = _crossing(beyond_bytes, low, high) if num_slow < most_slow else None
        return isqrt(low * high) if line is None or beyond_bytes[high] <= 0 else line
    is_lost = len(sizes) >= 4
    if low in beyond_bytes:
        line = _crossing(beyond_bytes, *sizes[-2:])
        return 2 * low if line is None else max(line, 2 * low) if is_lost else line
    line = _crossing(beyond_bytes, *sizes[:2])
    return high // 2 if line is None else min(line, high // 2) if is_lost else line


def _crossing(beyond_bytes: dict[int, int], first: int, second: int | None = None) -> int | None:
    """Where the line through two sizes crosses the limit; ``None`` for one size, or if it does not rise."""
    if second is None or beyond_bytes[second] <= beyond_bytes[first]:
        return None
    bytes_per_size = (beyond_bytes[second] - beyond_bytes[first]) / (second - first)
    return round(first - beyond_bytes[first] / bytes_per_size)
