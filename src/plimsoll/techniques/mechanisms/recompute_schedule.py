"""The optimal schedule of states to keep for backward through a chain of segments, if only some fit in memory.

Backward through a segment needs the state before the segment. States that were not kept are recomputed from the nearest
earlier state. The optimal schedule is the binomial one of Griewank and Walther ("revolve", ACM TOMS 26, 2000,
https://doi.org/10.1145/347837.347846). Gruslys et al. 2016 (https://arxiv.org/abs/1606.03401) derive the same schedule
for backpropagation through time by dynamic programming. With S states, and at most r recomputations of each segment, a
chain may have C(S + r, S) segments.

The state before the first segment is always available and needs no slot. All segments are assumed to cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import comb
from typing import TypeVar

State = TypeVar("State")


def first_kept(num_segments: int, num_slots: int) -> int:
    """Return the index of the segment before which to keep the first state, in addition to the chain's initial state.

    Args:
        num_segments: number of segments in the chain, at least 2.
        num_slots: number of states that may be kept in addition to the initial state, at least 1.
    """
    states = num_slots + 1
    repeats = 1
    while comb(states + repeats, states) < num_segments:
        repeats += 1
    # Any number of segments on the left between two bounds is optimal (theorem 6.1 of Griewank and Walther's
    # "Evaluating Derivatives"). The smallest number keeps the state early, so that fewer segments come before it.
    fewest_left = comb(states + repeats - 2, states) if repeats >= 2 else 1
    most_right = comb(states - 1 + repeats, states - 1)
    return max(fewest_left, num_segments - most_right, 1)


def kept_on_the_way(num_segments: int, num_slots: int) -> list[int]:
    """Return the indices of the segments before which the forward pass keeps the state, in ascending order."""
    kept: list[int] = []
    begin = 0
    while num_slots > len(kept) and num_segments - begin > 1:
        begin += first_kept(num_segments - begin, num_slots - len(kept))
        kept.append(begin)
    return kept


def backward_states(
    num_segments: int, num_slots: int, kept: dict[int, State], advance: Callable[[State, int, int], State]
) -> Iterator[tuple[int, State]]:
    """Yield the index of each segment, from last to first, with the state before the segment.

    Args:
        num_segments: number of segments in the chain.
        num_slots: number of states that may be kept in addition to the initial state, as in `kept_on_the_way`.
        kept: by segment, the state before segment 0 and the states kept by the forward pass. Used states are removed.
        advance: called as ``advance(state, begin, end)`` with the state before segment ``begin``. It returns the state
            before segment ``end``.
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
