"""Which op of one trace is which of another: two runs of the same training have the same ops in the same order.

Where they have not, the ops of the same part (the same stretch of one step and phase) are matched: from the front, from
the back, and between the two by looking for the next few ops that both have. It does NOT find the longest common
sequence, and gives up on a part where that many ops in a row are in one trace only (`_MOST_SKIPPED`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby

from plimsoll.records.trace import Trace

Pair = tuple[int | None, int | None]
"""Rows of two traces that are the same op; ``None`` where only one has it."""

_NUM_IN_A_ROW = 3  # ops alike before two places are taken for the same
_MOST_SKIPPED = 500  # ops of both together


def align(one: Trace, other: Trace) -> Iterator[Pair]:
    """Pair the rows of the ops of two traces, in order."""
    names, other_names = _names(one), _names(other)
    others = dict(_parts(other))
    for key, (start, end) in _parts(one):
        other_start, other_end = others.pop(key, (0, 0))
        for place, other_place in _matched(names[start:end], other_names[other_start:other_end]):
            yield (
                None if place is None else start + place,
                None if other_place is None else other_start + other_place,
            )
    for start, end in others.values():
        yield from ((None, row) for row in range(start, end))


def _names(trace: Trace) -> list[str]:
    return [trace.texts[number] for number in trace.ops.name]


def _parts(trace: Trace) -> Iterator[tuple[tuple[int, str, int], tuple[int, int]]]:
    """Stretches of ops of one step and phase: ``(step, phase, which of these), (first row, row after the last)``."""
    start, seen = 0, dict[tuple[int, str], int]()
    for step_and_phase, rows in groupby(zip(trace.ops.step, trace.ops.phase, strict=True)):
        number = seen[step_and_phase] = seen.get(step_and_phase, 0) + 1
        end = start + sum(1 for _ in rows)
        yield (*step_and_phase, number), (start, end)
        start = end


def _matched(a: list[str], b: list[str]) -> Iterator[Pair]:
    """Pair the places of two lists of names."""
    tail = 0
    while tail < min(len(a), len(b)) and a[-tail - 1] == b[-tail - 1]:
        tail += 1
    i, j, i_end, j_end = 0, 0, len(a) - tail, len(b) - tail
    places = _places_by_next_names(b, j_end)
    while i < i_end or j < j_end:
        if i < i_end and j < j_end and a[i] == b[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        i_next, j_next = _next_alike(a, places, (i, j), (i_end, j_end))
        yield from ((place, None) for place in range(i, i_next))
        yield from ((None, place) for place in range(j, j_next))
        i, j = i_next, j_next
    yield from zip(range(i_end, len(a)), range(j_end, len(b)), strict=True)


def _places_by_next_names(names: list[str], end: int) -> dict[tuple[str, ...], list[int]]:
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(end):
        places.setdefault(tuple(names[place : place + _NUM_IN_A_ROW]), []).append(place)
    return places


def _next_alike(
    a: list[str], places: dict[tuple[str, ...], list[int]], start: tuple[int, int], end: tuple[int, int]
) -> tuple[int, int]:
    """Where the next few names of both are alike, with the fewest of both left out; the ends, if that is not near."""
    best, num_skipped = end, _MOST_SKIPPED
    for i in range(start[0], min(end[0], start[0] + _MOST_SKIPPED)):
        if i - start[0] >= num_skipped:
            break
        found = places.get(tuple(a[i : i + _NUM_IN_A_ROW]), [])
        nearest = bisect_left(found, start[1])
        if nearest < len(found) and i - start[0] + found[nearest] - start[1] < num_skipped:
            best, num_skipped = (i, found[nearest]), i - start[0] + found[nearest] - start[1]
    return best
