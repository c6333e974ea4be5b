"""Guesses for many combinations at once equal the guess for each one; traced combinations keep their known values."""

import numpy as np
import pytest
from test_planning_search_surrogate import HALF, PLAIN, STATES, evaluate

from plimsoll.planning.search.combinations import Combination
from plimsoll.planning.search.guesses import guesses_of
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from worlds import MadeUp, World

HEAP = Choice(technique="heap")


@pytest.fixture(autouse=True)
def _their_world(inhabited):
    inhabited(World([MadeUp(HALF.technique), MadeUp(STATES.technique), MadeUp(HEAP.technique, is_traced=False)]))


def learned(beyond):
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=5, seconds=1.3), PLAIN[1])
    surrogate.correct(evaluate(16, (HALF, STATES), per_sample=5, update=120, seconds=2.0, beyond=beyond))
    return surrogate


def test_many_combinations_are_guessed_as_each_is_by_the_surrogate_of_its_heap():
    surrogates = {None: learned(50), HEAP: learned(70)}
    sizes = {(HALF,): [16, 8, 2], (): [16], (HALF, HEAP): [4, 1], (STATES, HALF): [8], (HEAP,): [16, 2]}
    guesses = guesses_of(
        [Combination(combination, np.asarray(some)) for combination, some in sizes.items()], surrogates, []
    )
    assert [guesses.choices(row) for row in (0, 3, 5)] == [
        (micro_batch_choice(16), HALF), (micro_batch_choice(16),), (micro_batch_choice(1), HALF, HEAP),
    ]  # fmt: skip
    rows = [(combination, size) for combination, some in sizes.items() for size in some]
    for row, (combination, size) in enumerate(rows):
        surrogate = surrogates[HEAP if HEAP in combination else None]
        needs, seconds = surrogate.guess([combination], np.zeros(1, dtype=int), np.asarray([size]))
        assert (guesses.combination(row), guesses.sizes[row]) == (combination, size)
        assert (guesses.needs[row], guesses.seconds[row]) == (needs[0], seconds[0])
    assert guesses.possible.all()
    assert not guesses.traced.any()


def test_what_was_traced_is_known():
    traced = evaluate(8, (HALF,), per_sample=100, seconds=9.0)
    combinations = [Combination((), np.asarray([16, 8])), Combination((HALF,), np.asarray([16, 8]))]
    guesses = guesses_of(combinations, {None: Surrogate(PLAIN)}, [traced, evaluate(4, (HALF,)), evaluate(8, (STATES,))])
    assert guesses.traced.tolist() == [False, False, False, True]
    assert (guesses.needs[3], guesses.seconds[3]) == (traced.need_bytes, 9.0)
