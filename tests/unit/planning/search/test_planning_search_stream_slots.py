"""Lanes by hand: calls of 1 s, kernels of 5 s, copies of 4 s, and what waits for what."""

import pytest

from plimsoll.planning.search.stream_slots import Lanes

CALL, KERNEL, COPY = 1, 5, 4


@pytest.fixture
def lanes():
    return Lanes(overlaps=True)


def test_a_copy_runs_beside_the_kernels_that_follow_it(lanes):
    lanes.copy(0, CALL, COPY, to_device=True)  # 1 to 5
    lanes.run(CALL, KERNEL)  # 2 to 7
    assert lanes.seconds == 7


def test_a_copy_begins_when_what_was_asked_before_is_done(lanes):
    lanes.run(CALL, KERNEL)  # 1 to 6
    lanes.copy(0, CALL, COPY, to_device=False)  # 6 to 10
    lanes.run(CALL, KERNEL)  # 6 to 11
    assert (lanes.link[False], lanes.seconds) == (10, 11)


def test_the_device_waits_for_a_copy_and_the_processor_goes_on(lanes):
    lanes.copy(0, CALL, COPY, to_device=True)  # 1 to 5
    lanes.wait(0, by_processor=False)
    lanes.run(CALL, KERNEL)  # called at 2, 5 to 10
    assert (lanes.processor, lanes.seconds) == (2, 10)


def test_the_processor_may_wait_too(lanes):
    lanes.copy(0, CALL, COPY, to_device=False)  # 1 to 5
    lanes.wait(0, by_processor=True)
    lanes.run(CALL, KERNEL)  # called at 6
    assert lanes.seconds == 6 + KERNEL


def test_one_direction_makes_one_copy_at_a_time_and_both_go_on_together(lanes):
    for row, to_device in enumerate((True, True, False)):
        lanes.copy(row, CALL, COPY, to_device=to_device)
    assert lanes.arrivals == {0: 1 + 4, 1: 5 + 4, 2: 3 + 4}


def test_gradients_are_added_up_by_a_thread_that_waits_alone(lanes):
    lanes.copy(0, CALL, COPY, to_device=False)  # 1 to 5
    lanes.wait(0, by_processor=True, in_backward=True)
    lanes.work(10, adds_up=True)  # 5 to 15
    lanes.run(CALL, KERNEL)  # 2 to 7
    assert (lanes.processor, lanes.device, lanes.seconds) == (2, 7, 15)


def test_what_was_asked_for_elsewhere_is_there(lanes):
    lanes.wait(17, by_processor=True)
    lanes.run(CALL, KERNEL)
    assert lanes.seconds == CALL + KERNEL


def test_a_copy_in_the_queue_is_an_op_like_others(lanes):
    lanes.run(CALL, COPY)  # 1 to 5
    lanes.run(CALL, KERNEL)
    assert lanes.seconds == 5 + KERNEL


def test_where_nothing_overlaps_the_processor_does_it_all():
    lanes = Lanes(overlaps=False)
    lanes.wait(0, by_processor=True)
    lanes.work(3, adds_up=True)
    lanes.run(CALL, KERNEL)
    assert lanes.seconds == CALL + 3 + KERNEL


def test_exchanges_between_ranks_run_beside_or_are_waited_for(lanes):
    lanes.run(CALL, KERNEL)
    lanes.fetched, lanes.waited = 8, 2
    assert lanes.seconds == 8 + 2
