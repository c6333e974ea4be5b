"""Ops of two traces, paired: equal ones one to one, others where they fit."""

import pytest
from memory_traces import trace_of

from plimsoll.memory.align import align


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("abc", "abc", [(0, 0), (1, 1), (2, 2)]),
        ("", "ab", [(None, 0), (None, 1)]),
        ("ab", "", [(0, None), (1, None)]),
        ("abcdef", "abXcdef", [(0, 0), (1, 1), (None, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),
        ("abXYcdef", "abcdef", [(0, 0), (1, 1), (2, None), (3, None), (4, 2), (5, 3), (6, 4), (7, 5)]),
        ("aXbcdYe", "abcdZe", [(0, 0), (1, None), (2, 1), (3, 2), (4, 3), (5, None), (None, 4), (6, 5)]),
        ("ab", "cd", [(0, None), (1, None), (None, 0), (None, 1)]),
        ("aa", "aaa", [(None, 0), (0, 1), (1, 2)]),
    ],
)
def test_what_is_alike_is_paired(one: str, other: str, expected: list):
    pairs = list(align(trace_of(list(one), []), trace_of(list(other), [])))
    assert sorted(pairs, key=str) == sorted(expected, key=str)
    assert [row for row, _ in pairs if row is not None] == list(range(len(one)))
    assert [row for _, row in pairs if row is not None] == list(range(len(other)))


def test_ops_of_another_phase_are_never_paired():
    pairs = list(align(trace_of(["a"], [], phase="forward"), trace_of(["a"], [], phase="backward")))
    assert pairs == [(0, None), (None, 0)]


def test_a_long_stretch_that_only_one_trace_has_ends_the_pairing_of_its_part():
    one, other = ["a", "b", "c", "d", "end"], ["a", *["x"] * 600, "b", "c", "d", "other end"]
    pairs = list(align(trace_of(one, []), trace_of(other, [])))
    assert [pair for pair in pairs if None not in pair] == [(0, 0)]
