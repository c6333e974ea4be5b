"""Combinations of made-up techniques, and an enumeration that leaves none out."""

import pytest

from plimsoll.planning.search.choices import Compatibility, available_choices
from plimsoll.planning.search.combinations import about, all_on_top, combinations_of, least_of, whole
from plimsoll.records.plan import Choice
from worlds import MadeUp, World


def one(name, level=0):
    return Choice(technique=name, options={"level": level})


@pytest.fixture
def world(inhabited):
    """Techniques `a` and `b` exclude each other, `c` needs the whole batch and `d` acts on optimizer states."""
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


def test_every_possible_combination_is_there_once_with_its_sizes(world):
    problem = world.problem(300)
    known = {"a": [one("a")], "b": [one("b", 0), one("b", 1)], "c": [one("c")]}
    allows = Compatibility(problem).allows
    found = {
        tuple(map(str, combination.choices)): combination.sizes.tolist()
        for combination in combinations_of(available_choices(problem), known, frozenset(), allows)
    }
    assert len(found) == 2 * 4  # without c and with it: none, a, b=0, b=1
    assert found["c=0",] == [16]
    assert found["a=0",] == list(available_choices(problem).sizes)
    required = combinations_of(available_choices(problem), known, frozenset({"b"}), allows)
    assert all({"b"} <= {choice.technique for choice in combination.choices} for combination in required)


def test_what_is_put_on_top_goes_together_and_reaches_what_is_there(world):
    problem = world.problem(300)
    evaluation = world.evaluate(whole((one("b", 0),), 16))
    combination = all_on_top(evaluation, available_choices(problem), Compatibility(problem).allows)
    assert {choice.technique for choice in combination} == {"b", "d"} or {
        choice.technique for choice in combination
    } == {"a", "d"}
    assert one("c") not in combination  # the smallest micro-batch is evaluated
    assert Compatibility(problem).allows(combination)


def test_of_those_that_need_about_as_little_the_fewest_techniques_are_taken(world):
    evaluations = [world.evaluate(whole(combination, 1)) for combination in ((one("d"),), (one("b", 1), one("d")), ())]
    assert [evaluation.need_bytes for evaluation in evaluations] == [210, 210, 250]
    assert least_of(evaluations) is evaluations[0]


@pytest.mark.parametrize("need_bytes", [100, 0, -100])
def test_about_is_never_less(need_bytes):
    assert need_bytes <= about(need_bytes) <= need_bytes + 1
