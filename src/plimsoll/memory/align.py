"""Which op of one trace is which of another: two runs of the same training have the same ops in the same order.

Where they have not, the ops of the same part (the same stretch of one step and phase) are matched: from the front, from
the back, and between the two by looking for the next few ops that both have. It takes time in proportion to the number
of ops, also where nothing matches. It does NOT find the longest common sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from plimsoll.records.trace import Trace

Pair = tuple[int | None, int | None]
"""Rows of two traces that are the same op; ``None`` where only one has it."""

_NUM_IN_A_ROW = 3  # ops alike before two places are taken for the same
_MOST_SKIPPED = 24  # ops of both together


def align(one: Trace, other: Trace) -> Iterator[Pair]:
    """Pair the rows of the ops of two traces, in order."""
    names, other_names = _names(one), _names(other)
    others = dict(_parts(other))
    for key, (start, end) in _parts(one):
        other_start, other_end = others.pop(key, (0, 0))
        yield from _matched(names, other_names, start, end, other_start, other_end)
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


def _matched(a: list[str], b: list[str], i: int, i_end: int, j: int, j_end: int) -> Iterator[Pair]:
    tail = 0
    while i < i_end - tail and j < j_end - tail and a[i_end - tail - 1] == b[j_end - tail - 1]:
        tail += 1
    i_last, j_last = i_end - tail, j_end - tail
    while i < i_last or j < j_last:
        if i < i_last and j < j_last and a[i] == b[j]:
            yield i, j
            i, j = i + 1, j + 1
            continue
        skip, other_skip = _next_alike(a, b, i, i_last, j, j_last)
        yield from ((row, None) for row in range(i, i + skip))
        yield from ((None, row) for row in range(j, j + other_skip))
        i, j = i + skip, j + other_skip
    yield from zip(range(i_last, i_end), range(j_last, j_end), strict=True)


def _next_alike(a: list[str], b: list[str], i: int, i_end: int, j: int, j_end: int) -> tuple[int, int]:
    """How many ops of each to leave out so that the next ones are alike, the fewest first; all, if none are near."""
    for skipped in range(1, _MOST_SKIPPED + 1):
        for other_skip in range(skipped + 1):
            x, y = i + skipped - other_skip, j + other_skip
            if x < i_end and y < j_end and a[x : x + _NUM_IN_A_ROW] == b[y : y + _NUM_IN_A_ROW]:
                return skipped - other_skip, other_skip
    return i_end - i, j_end - j
