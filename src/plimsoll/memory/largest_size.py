"""Search for the largest size that fits, with a handful of traces. The answer itself is verified by a trace.

Memory grows nearly in proportion to the batch size, and at worst with the square of the sequence length. It grows in
steps, because an allocator reserves segments and kernels change at some sizes. A line through two traces predicts the
memory of other sizes; one trace suffices if the growing part of its memory is known. The line gives the next size to
try. Every trace narrows the bracket between the largest fitting and the smallest failing size, until the requested
precision is reached. If lines narrow the bracket too slowly, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_TRACES = 16  # lines need 3 to 5 traces; steps and squares up to 15


@dataclass(frozen=True)
class Found(Generic[T]):
    """The result of `largest_that_fits`.

    ``value`` is the largest size that fits, and ``said`` the result of ``try_size`` for it. Both are ``None`` if no
    size fits. ``is_bound`` is True if even the largest size to try fits.
    """

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
        try_size: ``size -> (bytes beyond the limit, whether it fits, result)``; the bytes are negative if memory is
            left.
        start: the first size to try.
        most: the largest size to try.
        precision: largest relative gap between the answer and the first size that does not fit.
        growing_bytes: returns, for the result of ``start``, the bytes that grow with the size; 0 if unknown.
        suppose: called with a size that is likely to be tried after the next one, so that its trace can begin early.
    """
    beyond_bytes: dict[int, int] = {}
    best: T | None = None
    low, high = 0, most + 1  # largest size known to fit, smallest known not to fit
    num_slow = 0  # traces in a row that did not halve the bracket
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
            size, num_slow = round(size * (1 - beyond_bytes[size] / growing)), -1  # the first line uses this trace
            if low + 1 < size < high:
                suppose(size - 1)  # the line ignores terms in between, and gives a slightly larger size
        else:
            size = _next_to_try(beyond_bytes, low, high, num_slow)
        size = min(max(size, low + step), high - 1)
    return Found(low or None, best, high > most, len(beyond_bytes))


def _next_to_try(beyond_bytes: dict[int, int], low: int, high: int, num_slow: int) -> int:
    """Return the size at which a line through two traces crosses the limit, or bisect the bracket if lines are slow."""
    sizes = sorted(beyond_bytes)
    if low in beyond_bytes and high in beyond_bytes:
        most_slow = 1 if high > 2 * low else 2  # a good line needs two: the crossing, and the next size
        line = _crossing(beyond_bytes, low, high) if num_slow < most_slow else None
        return isqrt(low * high) if line is None or beyond_bytes[high] <= 0 else line
    is_lost = len(sizes) >= 4
    if low in beyond_bytes:
        line = _crossing(beyond_bytes, *sizes[-2:])
        return 2 * low if line is None else max(line, 2 * low) if is_lost else line
    line = _crossing(beyond_bytes, *sizes[:2])
    return high // 2 if line is None else min(line, high // 2) if is_lost else line


def _crossing(beyond_bytes: dict[int, int], first: int, second: int | None = None) -> int | None:
    """Return the size at which a line through two traces crosses the limit; ``None`` if the line does not rise."""
    if second is None or beyond_bytes[second] <= beyond_bytes[first]:
        return None
    bytes_per_size = (beyond_bytes[second] - beyond_bytes[first]) / (second - first)
    return round(first - beyond_bytes[first] / bytes_per_size)
