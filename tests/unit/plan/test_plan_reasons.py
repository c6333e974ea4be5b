from dataclasses import replace

import pytest
from plan.worlds import World

from plimsoll.plan.reasons import _pace
from plimsoll.plan.search import search


@pytest.mark.parametrize(
    ("seconds", "chosen_seconds", "reason"),
    [
        (0.00123, 0.001229, "no faster: the same 1.23 ms a step"),
        (0.0124, 0.0123, "no faster: 12.4 ms a step against 12.3 ms is less than the 2% that can be told apart"),
        (1.23, 1.24, "no faster: 1.23 s a step against 1.24 s is less than the 2% that can be told apart"),
        (1.5, 1.24, "slower: 1.5 s a step against 1.24 s"),
    ],
)
def test_a_reason_says_only_what_its_numbers_say(seconds, chosen_seconds, reason):
    assert _pace(seconds, chosen_seconds) == reason


@pytest.mark.parametrize(
    ("margin_bytes", "reason"),
    [
        (10, "needs up to 310 B, more than 260 B"),
        (60, "needs up to 310 B, too near 310 B for a first look"),
    ],
)
def test_what_is_rejected_is_said_against_the_line_of_the_device(inhabited, margin_bytes, reason):
    world = inhabited(World([]))
    problem = replace(world.problem(250), margin_bytes=margin_bytes)
    found = search(problem, world.look_at)
    assert reason in [one.reason for one in found.rejected]
