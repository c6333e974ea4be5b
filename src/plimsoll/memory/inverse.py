"""Which size fits: found with a handful of traces, and verified by one at the answer.

Memory grows nearly in proportion to a batch or a sequence, in pieces (an allocator takes segments, a kernel changes at
some size). So two traces give a line, the line gives the next size to try, and every trace narrows the bracket between
a size that fits and one that does not, until the two are neighbours or as near as was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_TRACES = 12


@dataclass(frozen=True)
class Found(Generic[T]):
    """The largest size that fits with what was said of it; ``None`` if not even the smallest does."""

    value: int | None
    said: T | None
    is_bound: bool
    num_traces: int


def largest_that_fits(
    try_size: Callable[[int], tuple[int, bool, T]], start: int, most: int, precision: float = 0.02
) -> Found[T]:
    """Find the largest size from 1 to ``most`` that fits.

    Args:
        try_size: ``size -> (bytes beyond the limit, whether it fits, what is to be said of it)``; the bytes are
            negative where there is room.
        start: where to begin.
        most: the largest size to try.
        precision: how near, as a share of the size, the answer may be below the first size that does not fit.
    """
    beyond_bytes: dict[int, int] = {}
    best: T | None = None
    low, high = 0, most + 1  # the largest size known to fit, the smallest known not to
    size = max(1, min(start, most))
    while len(beyond_bytes) < _MOST_TRACES:
        beyond_bytes[size], fits, said = try_size(size)
        if fits:
            low, best = size, said
        else:
            high = size
        if high - low <= max(1, int(precision * low)):
            break
        size = min(max(_nearer(beyond_bytes, most), low + 1), high - 1)
    return Found(low or None, best, high > most, len(beyond_bytes))


def _nearer(beyond_bytes: dict[int, int], most: int) -> int:
    """Where the line through the two sizes nearest to the limit crosses it; with one size, double it or half of it."""
    nearest = sorted(beyond_bytes, key=lambda size: abs(beyond_bytes[size]))[:2]
    if len(nearest) == 1:
        (size,) = nearest
        return size // 2 if beyond_bytes[size] > 0 else min(2 * size, most)
    first, second = nearest
    bytes_per_size = (beyond_bytes[second] - beyond_bytes[first]) / (second - first)
    if bytes_per_size <= 0:  # the allocator's steps: go on by halves
        return first // 2 if beyond_bytes[first] > 0 else min(2 * first, most)
    return int(first - beyond_bytes[first] / bytes_per_size)
