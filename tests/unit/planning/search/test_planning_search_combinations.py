"""Mixes of made-up techniques, and the one that leaves nothing out."""

import pytest

from plimsoll.planning.search.combinations import about, all_on_top, least_of, mixes_of, whole
from plimsoll.planning.search.options import Compatibility, menu_of
from plimsoll.records.plan import Choice
from worlds import MadeUp, World


def one(name, level=0):
    return Choice(technique=name, options={"level": level})


@pytest.fixture
def world(inhabited):
    """``a`` and ``b`` exclude each other, ``c`` goes with the whole batch only, ``d`` reaches the states."""
    return inhabited(
        World(
            [
                MadeUp("a", (4,), refuses=frozenset({"b"})),
                MadeUp("b", (2, 3), seconds=(0.1, 0.2)),
                MadeUp("c", (1,), refuses=frozenset({"small micro-batch"})),
                MadeUp("d", saves_fixed=40, reaches=frozenset({"optimizer states"})),
            ]
        )
    )


def test_every_mix_that_can_be_is_there_once_with_its_sizes(world):
    problem = world.problem(300)
    known = {"a": [one("a")], "b": [one("b", 0), one("b", 1)], "c": [one("c")]}
    allows = Compatibility(problem).allows
    found = {
        tuple(map(str, mix.choices)): mix.sizes.tolist()
        for mix in mixes_of(menu_of(problem), known, frozenset(), allows)
    }
    assert len(found) == 2 * 4  # without c and with it: none, a, b=0, b=1
    assert found["c=0",] == [16]
    assert found["a=0",] == list(menu_of(problem).sizes)
    required = mixes_of(menu_of(problem), known, frozenset({"b"}), allows)
    assert all({"b"} <= {choice.technique for choice in mix.choices} for mix in required)


def test_what_is_put_on_top_goes_together_and_reaches_what_is_there(world):
    problem = world.problem(300)
    look = world.look_at(whole((one("b", 0),), 16))
    mix = all_on_top(look, menu_of(problem), Compatibility(problem).allows)
    assert {choice.technique for choice in mix} == {"b", "d"} or {choice.technique for choice in mix} == {"a", "d"}
    assert one("c") not in mix  # the smallest micro-batch is looked at
    assert Compatibility(problem).allows(mix)


def test_of_those_that_need_about_as_little_the_fewest_techniques_are_taken(world):
    looks = [world.look_at(whole(mix, 1)) for mix in ((one("d"),), (one("b", 1), one("d")), ())]
    assert [look.need_bytes for look in looks] == [210, 210, 250]
    assert least_of(looks) is looks[0]


@pytest.mark.parametrize("need_bytes", [100, 0, -100])
def test_about_is_never_less(need_bytes):
    assert need_bytes <= about(need_bytes) <= need_bytes + 1
