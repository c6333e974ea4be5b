from dataclasses import replace

import pytest

from plimsoll.planning.search.reasons import _pace, rejected, untried
from plimsoll.planning.search.search import search
from plimsoll.records.plan import Duration, micro_batch_choice
from plimsoll.records.prediction import Estimate
from worlds import World


@pytest.mark.parametrize(
    ("seconds", "chosen_seconds", "reason"),
    [
        (0.00123, 0.001229, "no faster: the same 1.23 ms a step"),
        (0.0124, 0.0123, "no faster: 12.4 ms a step against 12.3 ms, less than the time model can resolve (2%)"),
        (1.23, 1.24, "no faster: 1.23 s a step against 1.24 s, less than the time model can resolve (2%)"),
        (1.5, 1.24, "slower: 1.5 s a step against 1.24 s"),
    ],
)
def test_a_reason_says_only_what_its_numbers_say(seconds, chosen_seconds, reason):
    assert _pace(seconds, chosen_seconds) == reason


@pytest.mark.parametrize(
    ("margin_bytes", "reason"),
    [
        (10, "needs up to 310 B, more than 260 B"),
        (60, "needs up to 310 B, too close to 310 B for a short dry run to tell"),
    ],
)
def test_what_is_rejected_is_said_against_the_line_of_the_device(inhabited, margin_bytes, reason):
    world = inhabited(World([]))
    problem = replace(world.problem(250), margin_bytes=margin_bytes)
    found = search(problem, world.evaluate)
    assert reason in [one.reason for one in found.rejected]
    too_large = [one for one in found.rejected if one.reason.startswith("needs")]
    assert [untried(one) for one in too_large] == too_large


def test_a_need_that_reads_like_the_line_is_said_by_how_much_it_is_more(inhabited):
    world, line_bytes = inhabited(World([])), 2 << 30
    peak = Estimate(likely_bytes=line_bytes, low_bytes=line_bytes, high_bytes=line_bytes + (12 << 20))
    evaluation = replace(world.evaluate((micro_batch_choice(1),)), peak=peak, fits=False)
    problem = replace(world.problem(line_bytes), margin_bytes=0)
    assert rejected(evaluation, evaluation, problem).reason == "needs up to 2.0 GiB, 12.0 MiB more than 2.0 GiB"


def test_what_was_slower_than_a_plan_that_lost_its_trial_is_said_not_to_be_tried(inhabited):
    world = inhabited(World([]))
    evaluation = world.evaluate((micro_batch_choice(1),))
    slower = replace(evaluation, step_time=Duration(likely_seconds=1.5, low_seconds=1.0, high_seconds=2.0))
    found = rejected(slower, evaluation, world.problem(evaluation.need_bytes))
    assert found.is_compared
    assert untried(found).reason == "not tried: 1.5 s a step predicted"
    assert untried(untried(found)) == untried(found)
