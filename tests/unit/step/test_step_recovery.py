"""The fallback schedule, step by step, with hand-computed values.

Samples have ten elements unless a test sets another number.
"""

import json

import pytest

from plimsoll.errors import InputError
from plimsoll.records.job import Job
from plimsoll.step.recovery import (
    FallbackSchedule,
    Measured,
    RanOut,
    Size,
    action_of,
    micro_batch_sizes,
    samples_of_rank,
    state_after_death,
)


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(1, (1,)), (2, (2, 1)), (5, (5, 3, 2, 1)), (7, (7, 4, 2, 1)), (12, (12, 6, 3, 2, 1)), (16, (16, 8, 4, 2, 1))],
)
def test_the_fallbacks_cut_a_batch_into_1_2_4_8_micro_batches_of_nearly_equal_size(batch_size, sizes):
    assert micro_batch_sizes(batch_size) == sizes


@pytest.mark.parametrize(("batch_size", "ranks", "samples"), [(9, 2, 5), (8, 4, 2), (7, 1, 7), (3, 3, 1)])
def test_a_rank_has_at_most_its_share_of_a_batch_rounded_up(batch_size, ranks, samples):
    job = Job.from_fields({"model": "lstm", "data": "a.txt", "batch_size": batch_size, "ranks": ranks})
    assert samples_of_rank(job) == samples


@pytest.mark.parametrize(
    ("samples", "next_samples", "techniques", "is_same_fallback", "action"),
    [
        (8, 4, None, False, "micro-batch 8 -> 4"),
        (8, 8, None, True, "same micro-batch once more"),
        (3, 3, None, False, "same micro-batch"),  # of a small batch, at the next fallback
        (8, 8, "heap=1", False, "same micro-batch with heap=1"),
        (4, 8, "heap=1", False, "micro-batch 4 -> 8 with heap=1"),
    ],
)
def test_what_is_done_is_said_by_what_changes(samples, next_samples, techniques, is_same_fallback, action):
    assert action_of(samples, next_samples, techniques, is_same_fallback=is_same_fallback) == action


@pytest.mark.parametrize("sizes", [[], [4, 8], [8, 8, 4], [4, 0]])
def test_sizes_that_do_not_go_down_are_refused(sizes):
    with pytest.raises(InputError, match=r"not distinct sizes from large to small: give for example \[32, 16, 8\]"):
        FallbackSchedule(sizes)


def in_force_of(fallback_schedule):
    """Return the current size in samples. The functions below use samples, too: these schedules have one level."""
    return fallback_schedule.sizes[fallback_schedule.in_force].samples


def configuration_of(fallback_schedule, num_samples):
    return fallback_schedule.sizes.index(Size(num_samples))


def failed(fallback_schedule, num_samples, num_elements):
    following = fallback_schedule.failed(configuration_of(fallback_schedule, num_samples), num_samples, num_elements)
    return None if following is None else fallback_schedule.sizes[following].samples


def held(fallback_schedule, num_elements):
    fallback_schedule.held(0, num_elements)


def choose(fallback_schedule, elements_per_sample):
    return fallback_schedule.sizes[fallback_schedule.choose(elements_per_sample)].samples


def descended(grow_after=3):
    """Return a fallback schedule that failed at 8 samples (80 elements) in its first step and now uses 4."""
    fallback_schedule = FallbackSchedule((8, 4, 2, 1), grow_after)
    assert failed(fallback_schedule, 8, 80) == 4
    return fallback_schedule


def test_a_size_that_never_fitted_is_not_tried_again():
    fallback_schedule = descended()
    assert in_force_of(fallback_schedule) == 4
    assert failed(fallback_schedule, 4, 40) == 2
    assert in_force_of(fallback_schedule) == 2


def test_a_size_that_fitted_gets_one_more_try():
    fallback_schedule = FallbackSchedule((8, 4, 2, 1))
    held(fallback_schedule, 80)
    assert [failed(fallback_schedule, 8, 80), failed(fallback_schedule, 8, 80)] == [8, 4]


def test_after_a_step_that_went_through_there_is_a_new_try():
    fallback_schedule = FallbackSchedule((8, 4, 2, 1))
    for _ in range(3):
        held(fallback_schedule, 80)
        assert failed(fallback_schedule, 8, 80) == 8
    assert in_force_of(fallback_schedule) == 8


def test_the_smallest_size_gets_one_more_try_and_then_nothing_is_left():
    fallback_schedule = FallbackSchedule((2, 1))
    assert [failed(fallback_schedule, 2, 20), failed(fallback_schedule, 1, 10), failed(fallback_schedule, 1, 10)] == [
        1,
        1,
        None,
    ]


def test_the_known_limit_counts_elements_and_not_samples():
    fallback_schedule = descended(grow_after=1)
    held(fallback_schedule, 40)
    assert choose(fallback_schedule, 10) == 4  # 8 x 10 failed
    assert choose(fallback_schedule, 9.9) == 8  # 79.2 elements are fewer than the 80 that failed


def test_the_next_larger_size_is_taken_after_clean_steps_one_fallback_at_a_time():
    fallback_schedule = descended()
    failed(fallback_schedule, 4, 40)
    chosen = []
    for _ in range(7):
        chosen.append(choose(fallback_schedule, 1))
        held(fallback_schedule, chosen[-1])
    assert chosen == [2, 2, 2, 4, 4, 4, 8]


def test_a_failure_begins_the_count_of_clean_steps_anew():
    fallback_schedule = descended()
    for _ in range(2):
        held(fallback_schedule, 40)
    assert failed(fallback_schedule, 4, 40) == 4  # it held before
    for _ in range(2):
        held(fallback_schedule, 40)
    assert choose(fallback_schedule, 9.9) == 4  # 80 elements failed, and 40 have held
    held(fallback_schedule, 39)
    assert choose(fallback_schedule, 9.9) == 8


def test_a_limit_at_which_a_step_holds_after_all_was_none():
    """The smallest size failed twice while another program used the memory; later steps use larger sizes again."""
    fallback_schedule = FallbackSchedule((2, 1), grow_after=1)
    assert [failed(fallback_schedule, 2, 20), failed(fallback_schedule, 1, 10), failed(fallback_schedule, 1, 10)] == [
        1,
        1,
        None,
    ]
    held(fallback_schedule, 9)
    assert choose(fallback_schedule, 10) == 1
    held(fallback_schedule, 10)
    assert choose(fallback_schedule, 10) == 2


def test_where_every_size_is_beyond_its_limit_the_smallest_is_tried():
    fallback_schedule = descended()
    assert choose(fallback_schedule, 1000) == 1


def test_it_never_grows_back_to_what_failed():
    fallback_schedule = descended(grow_after=1)
    for _ in range(100):
        assert choose(fallback_schedule, 10) == 4
        held(fallback_schedule, 40)


def test_a_batch_of_long_texts_does_not_change_the_fallback_for_good():
    """8 samples of 10 elements fit; 4 of 30 do not, 2 of 30 do: the limit is between 80 and 120 elements."""
    fallback_schedule = FallbackSchedule((8, 4, 2, 1), grow_after=1)
    held(fallback_schedule, 80)
    assert [failed(fallback_schedule, 8, 240), failed(fallback_schedule, 4, 120)] == [4, 2]
    held(fallback_schedule, 60)
    assert choose(fallback_schedule, 10) == 8  # short ones are whole again at once
    held(fallback_schedule, 80)
    assert choose(fallback_schedule, 30) == 2  # the next such batch is cut before it fails ...
    assert in_force_of(fallback_schedule) == 8  # ... and the fallback stays
    assert choose(fallback_schedule, 10) == 8


def test_a_failure_of_a_later_fallback_leaves_the_one_in_force():
    fallback_schedule = FallbackSchedule((8, 4, 2, 1))
    held(fallback_schedule, 8)
    failed(fallback_schedule, 8, 240)
    fallback_schedule.start_at(8)
    assert choose(fallback_schedule, 60) == 2  # 4 x 60 elements have failed
    assert failed(fallback_schedule, 2, 120) == 1
    assert in_force_of(fallback_schedule) == 8


@pytest.mark.parametrize(("num_samples", "in_force"), [(100, 8), (8, 8), (7, 4), (3, 2), (1, 1)])
def test_it_can_start_below_the_top(num_samples, in_force):
    fallback_schedule = FallbackSchedule((8, 4, 2, 1))
    fallback_schedule.start_at(num_samples)
    assert in_force_of(fallback_schedule) == in_force


def test_a_start_below_the_smallest_size_is_the_smallest():
    fallback_schedule = FallbackSchedule((8, 4))
    fallback_schedule.start_at(3)
    assert in_force_of(fallback_schedule) == 4


def test_a_fallback_schedule_restored_from_json_goes_on_like_the_saved_one():
    def decisions(fallback_schedule):
        chosen = []
        for _ in range(4):
            chosen.append(choose(fallback_schedule, 9))
            held(fallback_schedule, 9 * chosen[-1])
        return [
            *chosen,
            failed(fallback_schedule, 8, 80),
            choose(fallback_schedule, 10),
            failed(fallback_schedule, 4, 36),
            failed(fallback_schedule, 4, 36),
        ]

    fallback_schedule = descended()
    held(fallback_schedule, 40)
    other = FallbackSchedule((8, 4, 2, 1), grow_after=3)
    other.load_state_dict(json.loads(json.dumps(fallback_schedule.state_dict())))
    assert decisions(other) == decisions(fallback_schedule) == [4, 4, 8, 8, 4, 4, 4, 2]


def after_death(state, num_samples, too_large_samples=None):
    fallback_schedule = FallbackSchedule((8, 4, 2, 1), grow_after=3)
    too_large_fallback = None if too_large_samples is None else configuration_of(fallback_schedule, too_large_samples)
    fallback_schedule.load_state_dict(state_after_death(state, Size(num_samples), too_large_fallback))
    return fallback_schedule


def chosen_in(fallback_schedule, num_steps):
    chosen = []
    for _ in range(num_steps):
        chosen.append(choose(fallback_schedule, 10))
        held(fallback_schedule, 10 * chosen[-1])
    return chosen


def test_after_a_death_the_size_grows_back_to_the_top():
    assert chosen_in(after_death(None, 2), 7) == [2, 2, 2, 4, 4, 4, 8]


def test_the_clean_steps_before_a_death_do_not_count():
    before = FallbackSchedule((8, 4, 2, 1), grow_after=3)
    chosen_in(before, 3)
    assert chosen_in(after_death(before.state_dict(), 4), 4) == [4, 4, 4, 8]


def test_what_is_known_to_kill_is_the_limit_in_elements_of_the_first_batch():
    fallback_schedule = after_death(None, 2, 8)
    assert chosen_in(fallback_schedule, 9) == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    assert choose(fallback_schedule, 9.9) == 8  # 79.2 elements, and 80 killed


def test_a_limit_of_before_the_death_is_kept():
    before = descended()
    failed(before, 4, 40)
    assert chosen_in(after_death(before.state_dict(), 1, 8), 7) == [1, 1, 1, 2, 2, 2, 2]


def test_what_killed_is_not_forgotten_before_the_first_batch():
    again = FallbackSchedule((8, 4, 2, 1), grow_after=1)
    again.load_state_dict(json.loads(json.dumps(after_death(None, 4, 8).state_dict())))
    assert chosen_in(again, 3) == [4, 4, 4]


def test_a_checkpoint_from_before_deaths_were_kept_can_be_read():
    """This includes checkpoints from before levels existed, with one limit for all of them."""
    state = {"size": 4, "num_clean_steps": 0, "held_elements": 0, "failed_elements": 80}
    fallback_schedule = FallbackSchedule((8, 4, 2, 1))
    fallback_schedule.load_state_dict(state)
    assert fallback_schedule.state_dict() == descended().state_dict()
    fallback_schedule = FallbackSchedule((8, 4))
    fallback_schedule.load_state_dict({"size": 8, "num_clean_steps": 3, "held_elements": 80, "failed_elements": None})
    assert failed(fallback_schedule, 8, 80) == 8  # it held: once more


# Three fallbacks with the whole batch or half of it, then two with techniques that need less, then two with more of
# them.
LEVELS = (Size(8, 0), Size(4, 0), Size(8, 1), Size(4, 1), Size(8, 2), Size(2, 2))


@pytest.mark.parametrize(
    "sizes",
    [
        [Size(8, 1)],
        [Size(8, 0), Size(8, 2)],
        [Size(8, 0), Size(8, 1), Size(4, 0)],
        [Size(8, 0), Size(8, 1), Size(8, 1)],
    ],
)
def test_levels_count_up_from_0(sizes):
    with pytest.raises(InputError, match="not distinct sizes from large to small"):
        FallbackSchedule(sizes)


def test_it_goes_from_fallback_to_fallback_and_on_to_the_next_level():
    fallback_schedule = FallbackSchedule(LEVELS)
    followed = [
        fallback_schedule.failed(fallback, LEVELS[fallback].samples, 10 * LEVELS[fallback].samples)
        for fallback in (0, 1, 2, 3, 4)
    ]
    assert followed == [1, 2, 3, 4, 5]
    assert fallback_schedule.in_force == 5
    assert [fallback_schedule.failed(5, 2, 20), fallback_schedule.failed(5, 2, 20)] == [5, None]  # the last once more


def test_a_small_batch_skips_fallbacks_that_would_not_cut_it():
    """A pass of 4 or 8 holds all 3 samples, so only the other fallbacks change anything."""
    fallback_schedule = FallbackSchedule(LEVELS)
    assert [
        fallback_schedule.failed(0, 3, 30),
        fallback_schedule.failed(2, 3, 30),
        fallback_schedule.failed(4, 3, 30),
    ] == [2, 4, 5]


def test_each_level_has_limits_of_its_own():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=10**9)
    assert fallback_schedule.failed(0, 8, 240) == 1  # 8 x 30 at level 0
    assert fallback_schedule.failed(1, 4, 120) == 2  # 4 x 30: the limit there
    fallback_schedule.held(2, 240)
    assert fallback_schedule.failed(2, 8, 240) == 2  # held at level 1, so once more
    fallback_schedule.start_at(8)
    assert [fallback_schedule.choose(10), fallback_schedule.choose(20), fallback_schedule.choose(30)] == [0, 1, 2]
    assert [fallback_schedule.in_force, fallback_schedule.choose(1000)] == [0, 2]


def test_it_grows_back_over_a_level_after_clean_steps():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=2)
    fallback_schedule.failed(0, 8, 80)
    fallback_schedule.failed(1, 4, 40)
    fallback_schedule.failed(2, 8, 80)
    chosen = []
    for _ in range(7):  # batches of one element each, far below every limit
        chosen.append(fallback_schedule.choose(1))
        fallback_schedule.held(chosen[-1], LEVELS[chosen[-1]].samples)
    assert chosen == [3, 3, 2, 2, 1, 1, 0]


def test_it_does_not_grow_back_over_a_level_whose_limit_is_too_low():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=1)
    fallback_schedule.failed(0, 8, 80)
    fallback_schedule.failed(1, 4, 40)
    for _ in range(5):
        assert fallback_schedule.choose(10) == 2  # 4 x 10 failed at level 0
        fallback_schedule.held(2, 80)


def test_where_the_size_changes_nothing_another_level_is_taken_and_never_the_first_again():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=1)
    assert [
        fallback_schedule.failed(0, 8, 80, needs_other_level=True),
        fallback_schedule.failed(0, 8, 80, needs_other_level=True),
    ] == [0, 2]
    for _ in range(5):
        assert fallback_schedule.choose(0.5) == 2
        fallback_schedule.held(2, 4)
    assert [
        fallback_schedule.failed(4, 8, 80, needs_other_level=True),
        fallback_schedule.failed(4, 8, 80, needs_other_level=True),
    ] == [
        4,
        None,
    ]


def test_a_try_of_the_update_is_not_used_up_by_one_of_the_forward_pass():
    failed = FallbackSchedule((8,)).failed
    assert [failed(0, 8, 80), failed(0, 8, 80, needs_other_level=True), failed(0, 8, 80)] == [
        0, 0, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "fallback"), [((8, 0), 0), ((7, 0), 1), ((3, 0), 2), ((3, 1), 4), ((1, 2), 5), ((8, 7), 5)]
)
def test_it_can_start_at_a_level(start, fallback):
    fallback_schedule = FallbackSchedule(LEVELS)
    fallback_schedule.start_at(*start)
    assert fallback_schedule.in_force == fallback


def test_a_fallback_schedule_with_levels_restored_from_json_goes_on_like_the_saved_one():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=2)
    fallback_schedule.failed(0, 8, 80)
    fallback_schedule.failed(1, 4, 40)
    fallback_schedule.held(2, 80)
    state = json.loads(json.dumps(fallback_schedule.state_dict()))
    other = FallbackSchedule(LEVELS, grow_after=2)
    other.load_state_dict(state)
    assert other.state_dict() == fallback_schedule.state_dict()
    for one in (fallback_schedule, other):
        assert [one.choose(9), one.failed(2, 8, 80), one.failed(2, 8, 80), one.choose(9), one.choose(10)] == [
            2, 2, 3, 3, 3
        ]  # fmt: skip


def test_the_state_of_a_plan_with_other_levels_is_taken_as_far_as_it_goes():
    fallback_schedule = FallbackSchedule(LEVELS)
    fallback_schedule.failed(0, 8, 80)
    fallback_schedule.failed(1, 4, 40)
    fallback_schedule.failed(2, 8, 80)
    state = json.loads(json.dumps(fallback_schedule.state_dict()))
    fewer = FallbackSchedule((8, 4, 2))
    fewer.load_state_dict(state)
    assert (fewer.in_force, fewer.state_dict()["failed_elements"]) == (2, [40])
    more = FallbackSchedule([*LEVELS, Size(1, 3)])
    more.load_state_dict(state)
    assert (more.in_force, more.state_dict()["failed_elements"]) == (3, [40, 80, None, None])


def test_after_a_death_at_a_fallback_no_earlier_one_is_taken_with_as_much():
    """Fallback 2 was killed at 10 elements per sample. Fallbacks 0 and 1 need more, even without records of them."""
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=1)
    fallback_schedule.load_state_dict(json.loads(json.dumps(state_after_death(None, LEVELS[3], too_large_fallback=2))))
    chosen = []
    for elements_per_sample in (10, 10, 9, 9, 4.9, 10, 10):
        chosen.append(fallback_schedule.choose(elements_per_sample))
        fallback_schedule.held(chosen[-1], 1)
    assert chosen == [3, 3, 2, 1, 0, 3, 3]
    assert fallback_schedule.state_dict()["failed_elements"] == [40, 80, None]


def test_passes_that_must_stay_whole_go_from_level_to_level_and_fallbacks_keep_their_numbers():
    fallback_schedule = FallbackSchedule(LEVELS, grow_after=1, least_samples=8)
    assert [
        fallback_schedule.failed(0, 8, 80),
        fallback_schedule.failed(2, 8, 80),
        fallback_schedule.failed(4, 8, 80),
    ] == [2, 4, 4]
    assert [fallback_schedule.is_last(fallback) for fallback in (0, 2, 4)] == [False, False, True]
    chosen = []
    for _ in range(3):
        chosen.append(fallback_schedule.choose(1))
        fallback_schedule.held(chosen[-1], 8)
    assert chosen == [4, 2, 0]
    fallback_schedule.start_at(4)
    assert fallback_schedule.in_force == 2
    assert FallbackSchedule((4, 2), least_samples=8).in_force == 0


# -- what an event teaches, and what clean steps do --------------------------------------------------------------------

FIXED, PER_ELEMENT = 100, 1  # bytes that a simulated step takes
OF_A_PLAN = (Size(6, 0), Size(16, 1), Size(4, 1), Size(1, 2))  # the second level needs a tenth for each element
NEEDS = tuple(FIXED + size.samples * 10 * (1, 0.1, 0.05)[size.level] for size in OF_A_PLAN)  # 160, 116, 104, 100.5


def steps_with(fallback_schedule, lengths, limit_bytes, spoiled=(), real=1.0):
    """Return the fallbacks of successful steps; steps in `spoiled` run out of memory once although it suffices."""
    done = []
    for number, length in enumerate(lengths):
        fallback, fails = fallback_schedule.choose(length), number in spoiled
        while True:
            samples, level = fallback_schedule.sizes[fallback]
            growing = samples * length * PER_ELEMENT * (1, 0.1, 0.05)[level] * real
            if not fails and FIXED + growing <= limit_bytes:
                break
            ran_out = RanOut(int(FIXED + growing), limit_bytes)
            fallback, fails = fallback_schedule.failed(fallback, samples, samples * length, ran_out=ran_out), False
        fallback_schedule.held(
            fallback, samples * length, Measured(int(FIXED + growing), FIXED) if fallback_schedule.is_lowered else None
        )
        done.append(fallback)
    return done


def test_after_an_event_the_fastest_fallback_that_fits_by_what_was_measured_is_taken():
    """The first needs 1.5 times its growth, which is 190 of 150 bytes, so the fallback for 160 x 150 / 190 is taken."""
    fallback_schedule = FallbackSchedule(OF_A_PLAN, needs=NEEDS)
    assert steps_with(fallback_schedule, [10], limit_bytes=150, real=1.5) == [1]
    far_over = FallbackSchedule(OF_A_PLAN, needs=NEEDS)
    assert far_over.failed(0, 6, 60, ran_out=RanOut(wanted_bytes=230, limit_bytes=150)) == 2
    assert (
        FallbackSchedule(OF_A_PLAN, needs=NEEDS).failed(0, 6, 60, ran_out=RanOut(900, 150)) == 3
    )  # the last: nothing fits
    assert (
        FallbackSchedule(OF_A_PLAN).failed(0, 6, 60, ran_out=RanOut(900, 150)) == 1
    )  # without a plan nothing is known


@pytest.mark.parametrize("needs", [NEEDS, ()])
def test_after_one_event_the_size_is_back_within_ten_steps(needs):
    """Another program took memory for a moment: by the measured peaks, the first fallback fits."""
    sizes = OF_A_PLAN if needs else (16, 8, 4)
    done = steps_with(FallbackSchedule(sizes, needs=needs), [10] * 12, limit_bytes=300, spoiled=[0])
    assert done[0] > 0
    assert done[10:] == [0, 0]


def test_where_there_is_no_room_the_size_that_failed_is_left_alone():
    done = steps_with(FallbackSchedule((16, 8, 4)), [10] * 40, limit_bytes=190)
    assert done == [1] * 40


def test_a_larger_size_that_was_tried_in_vain_waits_four_times_as_long():
    """Measured peaks promise enough memory, but each try fails: after 3, 12 and 48 more clean steps."""
    fallback_schedule, tries = FallbackSchedule((16, 8), grow_after=1000), []
    fallback_schedule.failed(0, 16, 160, ran_out=RanOut(1000, 900))
    for number in range(70):
        fallback = fallback_schedule.choose(10)
        if fallback == 0:
            tries.append(number)
            fallback = fallback_schedule.failed(0, 16, 160, ran_out=RanOut(1000, 900))
        fallback_schedule.held(fallback, 80, Measured(200, FIXED))
    assert tries == [3, 15, 63]


def test_a_batch_of_long_texts_that_comes_first_does_not_bind_short_ones():
    """8 samples of 256 tokens fit, so 16 of 32 do: these stay whole at once, and the next long batch is cut."""
    fallback_schedule = FallbackSchedule((16, 8, 4), grow_after=1000)
    done = steps_with(fallback_schedule, [256, *[32] * 5, 256, 32], limit_bytes=FIXED + 8 * 256)
    assert done == [1, *[0] * 5, 1, 0]


def test_one_long_batch_does_not_halve_those_after_it():
    done = steps_with(FallbackSchedule((16, 8, 4), grow_after=1000), [32, 256, *[32] * 30], limit_bytes=FIXED + 8 * 256)
    assert done == [0, 1, *[0] * 30]


def test_free_memory_is_asked_for_only_after_an_event_and_below_the_first_fallback():
    fallback_schedule = FallbackSchedule((16, 8))
    assert not fallback_schedule.is_lowered
    fallback_schedule.start_at(8)
    assert not fallback_schedule.is_lowered  # this is the size that training started with
    fallback_schedule.failed(1, 8, 80, ran_out=RanOut(100, 100))
    assert fallback_schedule.is_lowered
