"""Timelines of CUDA streams by hand: calls of 1 s, kernels of 5 s and copies of 4 s, and their dependencies."""

import pytest

from plimsoll.planning.search.stream_timeline import StreamTimeline

CALL, KERNEL, COPY = 1, 5, 4


@pytest.fixture
def timeline():
    return StreamTimeline(overlaps=True)


def test_a_copy_runs_beside_the_kernels_that_follow_it(timeline):
    timeline.copy(0, CALL, COPY, to_device=True)  # 1 to 5
    timeline.run(CALL, KERNEL)  # 2 to 7
    assert timeline.seconds == 7


def test_a_copy_begins_when_what_was_asked_before_is_done(timeline):
    timeline.run(CALL, KERNEL)  # 1 to 6
    timeline.copy(0, CALL, COPY, to_device=False)  # 6 to 10
    timeline.run(CALL, KERNEL)  # 6 to 11
    assert (timeline.link[False], timeline.seconds) == (10, 11)


def test_the_device_waits_for_a_copy_and_the_processor_goes_on(timeline):
    timeline.copy(0, CALL, COPY, to_device=True)  # 1 to 5
    timeline.wait(0, by_processor=False)
    timeline.run(CALL, KERNEL)  # called at 2, 5 to 10
    assert (timeline.processor, timeline.seconds) == (2, 10)


def test_the_processor_may_wait_too(timeline):
    timeline.copy(0, CALL, COPY, to_device=False)  # 1 to 5
    timeline.wait(0, by_processor=True)
    timeline.run(CALL, KERNEL)  # called at 6
    assert timeline.seconds == 6 + KERNEL


def test_one_direction_makes_one_copy_at_a_time_and_both_go_on_together(timeline):
    for row, to_device in enumerate((True, True, False)):
        timeline.copy(row, CALL, COPY, to_device=to_device)
    assert timeline.arrivals == {0: 1 + 4, 1: 5 + 4, 2: 3 + 4}


def test_gradients_are_added_up_by_a_thread_that_waits_alone(timeline):
    timeline.copy(0, CALL, COPY, to_device=False)  # 1 to 5
    timeline.wait(0, by_processor=True, in_backward=True)
    timeline.work(10, adds_up=True)  # 5 to 15
    timeline.run(CALL, KERNEL)  # 2 to 7
    assert (timeline.processor, timeline.device, timeline.seconds) == (2, 7, 15)


def test_what_was_asked_for_elsewhere_is_there(timeline):
    timeline.wait(17, by_processor=True)
    timeline.run(CALL, KERNEL)
    assert timeline.seconds == CALL + KERNEL


def test_a_copy_in_the_queue_is_an_op_like_others(timeline):
    timeline.run(CALL, COPY)  # 1 to 5
    timeline.run(CALL, KERNEL)
    assert timeline.seconds == 5 + KERNEL


def test_where_nothing_overlaps_the_processor_does_it_all():
    timeline = StreamTimeline(overlaps=False)
    timeline.wait(0, by_processor=True)
    timeline.work(3, adds_up=True)
    timeline.run(CALL, KERNEL)
    assert timeline.seconds == CALL + 3 + KERNEL


def test_exchanges_between_ranks_run_beside_or_are_waited_for(timeline):
    timeline.run(CALL, KERNEL)
    timeline.fetched, timeline.waited = 8, 2
    assert timeline.seconds == 8 + 2
