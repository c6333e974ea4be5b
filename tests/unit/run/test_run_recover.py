"""The ladder of micro-batches, step by step and by hand; ten elements per sample unless a test says otherwise."""

import json

import pytest

from plimsoll.errors import InputError
from plimsoll.run.recover import Ladder, micro_batch_sizes, state_after_death


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (1,)), (2, (2, 1)), (5, (5, 3, 2, 1)), (7, (7, 4, 2, 1)), (12, (12, 6, 3, 2, 1)), (16, (16, 8, 4, 2, 1))],
)
def test_the_rungs_are_1_2_4_8_pieces_of_nearly_equal_size(batch_size, sizes):
    assert micro_batch_sizes(batch_size) == sizes


@pytest.mark.parametrize("sizes", [[], [4, 8], [8, 8, 4], [4, 0]])
def test_rungs_that_do_not_go_down_are_refused(sizes):
    with pytest.raises(InputError, match=r"not distinct sizes from large to small: give for example \[32, 16, 8\]"):
        Ladder(sizes)


def descended(grow_after=3):
    """A ladder that failed at 8 samples (80 elements) in its first step and stands at 4."""
    ladder = Ladder((8, 4, 2, 1), grow_after)
    assert ladder.failed(8, 80) == 4
    return ladder


def test_a_size_that_never_held_is_not_tried_again():
    ladder = descended()
    assert ladder.in_force == 4
    assert ladder.failed(4, 40) == 2
    assert ladder.in_force == 2


def test_a_size_that_held_gets_one_more_try():
    ladder = Ladder((8, 4, 2, 1))
    ladder.held(80)
    assert [ladder.failed(8, 80), ladder.failed(8, 80)] == [8, 4]


def test_after_a_step_that_went_through_there_is_a_new_try():
    ladder = Ladder((8, 4, 2, 1))
    for _ in range(3):
        ladder.held(80)
        assert ladder.failed(8, 80) == 8
    assert ladder.in_force == 8


def test_the_smallest_size_gets_one_more_try_and_then_nothing_is_left():
    ladder = Ladder((2, 1))
    assert [ladder.failed(2, 20), ladder.failed(1, 10), ladder.failed(1, 10)] == [1, 1, None]


def test_the_known_limit_counts_elements_and_not_samples():
    ladder = descended(grow_after=1)
    ladder.held(40)
    assert ladder.choose(10) == 4  # 8 x 10 failed
    assert ladder.choose(9.9) == 8  # 79.2 elements are less than what failed


def test_the_next_larger_size_is_taken_after_clean_steps_one_rung_at_a_time():
    ladder = descended()
    ladder.failed(4, 40)
    chosen = []
    for _ in range(7):
        chosen.append(ladder.choose(1))
        ladder.held(chosen[-1])
    assert chosen == [2, 2, 2, 4, 4, 4, 8]


def test_a_failure_begins_the_count_of_clean_steps_anew():
    ladder = descended()
    for _ in range(2):
        ladder.held(40)
    assert ladder.failed(4, 40) == 4  # it held before
    for _ in range(2):
        ladder.held(40)
    assert ladder.choose(1) == 4
    ladder.held(4)
    assert ladder.choose(1) == 8


def test_it_never_grows_back_to_what_failed():
    ladder = descended(grow_after=1)
    for _ in range(100):
        assert ladder.choose(10) == 4
        ladder.held(40)


def test_a_batch_of_long_texts_does_not_lower_the_rung_for_good():
    """8 samples of 10 elements fit; 4 of 30 do not, 2 of 30 do: the limit is between 80 and 120 elements."""
    ladder = Ladder((8, 4, 2, 1), grow_after=1)
    ladder.held(80)
    assert [ladder.failed(8, 240), ladder.failed(4, 120)] == [4, 2]
    ladder.held(60)
    assert ladder.choose(10) == 4
    ladder.held(40)
    assert ladder.choose(10) == 8
    ladder.held(80)
    assert ladder.choose(30) == 2  # the next such batch is cut before it fails ...
    assert ladder.in_force == 8  # ... and the rung stays
    assert ladder.choose(10) == 8


def test_a_failure_below_the_rung_in_force_does_not_move_it():
    ladder = Ladder((8, 4, 2, 1))
    ladder.held(8)
    ladder.failed(8, 240)
    ladder.start_at(8)
    assert ladder.choose(60) == 2  # 4 x 60 is what failed
    assert ladder.failed(2, 120) == 1
    assert ladder.in_force == 8


@pytest.mark.parametrize(("num_samples", "in_force"), [(100, 8), (8, 8), (7, 4), (3, 2), (1, 1)])
def test_it_can_start_below_the_top(num_samples, in_force):
    ladder = Ladder((8, 4, 2, 1))
    ladder.start_at(num_samples)
    assert ladder.in_force == in_force


def test_a_start_below_the_smallest_size_is_the_smallest():
    ladder = Ladder((8, 4))
    ladder.start_at(3)
    assert ladder.in_force == 4


def test_a_ladder_put_back_from_json_goes_on_like_the_one_it_was():
    def decisions(ladder):
        chosen = []
        for _ in range(4):
            chosen.append(ladder.choose(9))
            ladder.held(9 * chosen[-1])
        return [*chosen, ladder.failed(8, 80), ladder.choose(10), ladder.failed(4, 36), ladder.failed(4, 36)]

    ladder = descended()
    ladder.held(40)
    other = Ladder((8, 4, 2, 1), grow_after=3)
    other.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert decisions(other) == decisions(ladder) == [4, 4, 8, 8, 4, 4, 4, 2]


def after_death(state, *sizes):
    ladder = Ladder((8, 4, 2, 1), grow_after=3)
    ladder.load_state_dict(state_after_death(state, *sizes))
    return ladder


def chosen_in(ladder, num_steps):
    chosen = []
    for _ in range(num_steps):
        chosen.append(ladder.choose(10))
        ladder.held(10 * chosen[-1])
    return chosen


def test_after_a_death_the_size_grows_back_to_the_top():
    assert chosen_in(after_death(None, 2), 7) == [2, 2, 2, 4, 4, 4, 8]


def test_the_clean_steps_before_a_death_do_not_count():
    before = Ladder((8, 4, 2, 1), grow_after=3)
    chosen_in(before, 3)
    assert chosen_in(after_death(before.state_dict(), 4), 4) == [4, 4, 4, 8]


def test_what_is_known_to_kill_is_the_limit_in_elements_of_the_first_batch():
    ladder = after_death(None, 2, 8)
    assert chosen_in(ladder, 9) == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    assert ladder.choose(9.9) == 8  # 79.2 elements, and 80 killed


def test_a_limit_of_before_the_death_is_kept():
    before = descended()
    before.failed(4, 40)
    assert chosen_in(after_death(before.state_dict(), 1, 8), 7) == [1, 1, 1, 2, 2, 2, 2]


def test_what_killed_is_not_forgotten_before_the_first_batch():
    again = Ladder((8, 4, 2, 1), grow_after=1)
    again.load_state_dict(json.loads(json.dumps(after_death(None, 4, 8).state_dict())))
    assert chosen_in(again, 3) == [4, 4, 4]


def test_a_checkpoint_from_before_deaths_were_kept_can_be_read():
    state = descended().state_dict()
    del state["too_large_samples"]
    ladder = Ladder((8, 4, 2, 1))
    ladder.load_state_dict(state)
    assert ladder.state_dict() == descended().state_dict()
