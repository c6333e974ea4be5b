"""Which states to keep of a chain of segments that is walked once forward and then backward, when only some fit.

Backward over segment i needs the state before it. States that were not kept are computed again from the nearest one
before them; what is optimal is known: Griewank and Walther's binomial schedule ("revolve", ACM TOMS 26, 2000,
https://doi.org/10.1145/347837.347846), which Gruslys et al. 2016 (https://arxiv.org/abs/1606.03401) found again for
backpropagation through time by dynamic programming. With S states kept and every segment computed again at most r
times, a chain may have C(S + r, S) segments.

The state before the first segment is always there and is counted as no slot. It does NOT know segments of different
cost: all count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import comb
from typing import TypeVar

State = TypeVar("State")


def first_kept(num_segments: int, num_slots: int) -> int:
    """Return the segment before which the first state is kept, of a chain whose first state is there.

    Args:
        num_segments: of the chain, at least 2.
        num_slots: states that may be kept beside the first, at least 1.
    """
    states = num_slots + 1
    repeats = 1
    while comb(states + repeats, states) < num_segments:
        repeats += 1
    # Any number of segments between two bounds is optimal on the left; the fewest are taken, so that what is kept
    # stands early and fewer segments wait for it (theorem 6.1 of Griewank and Walther's "Evaluating Derivatives").
    fewest_left = comb(states + repeats - 2, states) if repeats >= 2 else 1
    most_right = comb(states - 1 + repeats, states - 1)
    return max(fewest_left, num_segments - most_right, 1)


def kept_on_the_way(num_segments: int, num_slots: int) -> list[int]:
    """Return the segments before which the walk forward keeps the state, in order."""
    kept: list[int] = []
    begin = 0
    while num_slots > len(kept) and num_segments - begin > 1:
        begin += first_kept(num_segments - begin, num_slots - len(kept))
        kept.append(begin)
    return kept


def backward_states(
    num_segments: int, num_slots: int, kept: dict[int, State], advance: Callable[[State, int, int], State]
) -> Iterator[tuple[int, State]]:
    """Yield each segment, from the last to the first, with the state before it.

    Args:
        num_segments: of the chain.
        num_slots: as they were in `kept_on_the_way`.
        kept: the state before segment 0, and those that the walk forward has kept; they are taken out of it.
        advance: computes the state before segment ``end`` of that before segment ``begin``.
    """
    begins = [0, *kept_on_the_way(num_segments, num_slots)]
    for number, (begin, end) in reversed(list(enumerate(zip(begins, [*begins[1:], num_segments], strict=True)))):
        yield from _walked_back(begin, end, kept.pop(begin), num_slots - number, advance)


def _walked_back(
    begin: int, end: int, state: State, num_slots: int, advance: Callable[[State, int, int], State]
) -> Iterator[tuple[int, State]]:
    if end - begin > 1 and num_slots > 0:
        middle = begin + first_kept(end - begin, num_slots)
        yield from _walked_back(middle, end, advance(state, begin, middle), num_slots - 1, advance)
        yield from _walked_back(begin, middle, state, num_slots, advance)
        return
    for segment in range(end - 1, begin, -1):
        yield segment, advance(state, begin, segment)
    yield begin, state
