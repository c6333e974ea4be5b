"""The schedule recomputes as little as possible, and visits every segment once."""

from functools import cache

import pytest

from plimsoll.techniques.mechanisms.recompute_schedule import backward_states, first_kept, kept_on_the_way


@cache
def least_advances(num_segments, num_slots):
    """Return the minimum by trying every place for the next state (recursion of Gruslys et al. 2016)."""
    if num_segments == 1:
        return 0
    if num_slots == 0:
        return num_segments * (num_segments - 1) // 2
    return min(
        middle + least_advances(num_segments - middle, num_slots - 1) + least_advances(middle, num_slots)
        for middle in range(1, num_segments)
    )


@pytest.mark.parametrize("num_slots", range(9))
def test_no_schedule_computes_less_again(num_slots):
    for num_segments in range(1, 61):
        log = []

        def advance(state, begin, end, log=log):
            assert state == begin, "it goes on from a state that is there"
            log.append(end - begin)
            return end

        kept = {begin: begin for begin in (0, *kept_on_the_way(num_segments, num_slots))}
        assert len(kept) <= num_slots + 1
        visited = list(backward_states(num_segments, num_slots, kept, advance))
        assert visited == [(segment, segment) for segment in reversed(range(num_segments))]
        assert kept == {}
        # The way to the last state that is kept was walked forward already.
        walked = max(kept_on_the_way(num_segments, num_slots), default=0)
        assert sum(log) + walked == least_advances(num_segments, num_slots)


def test_all_states_kept_is_one_pass_more():
    assert kept_on_the_way(5, 4) == [1, 2, 3, 4]


def test_three_states_hold_ten_segments_that_are_computed_again_twice():
    # C(3 + 2, 3) = 10, in the words of Griewank and Walther: 3 states with the first, 2 repeats.
    assert first_kept(10, 2) == 4
    assert kept_on_the_way(10, 2) == [4, 7]
