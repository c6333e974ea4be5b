"""Rows of many mixes: what is guessed of each by itself, but where it was traced what is known."""

import numpy as np
from test_planning_search_surrogate import HALF, PLAIN, STATES, look

from plimsoll.planning.search.combinations import Mix
from plimsoll.planning.search.guesses import guesses_of
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice

HEAP = Choice(technique="heap")


def learned(beyond):
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, look(16, (HALF,), per_sample=5, seconds=1.3), PLAIN[1])
    surrogate.correct(look(16, (HALF, STATES), per_sample=5, update=120, seconds=2.0, beyond=beyond))
    return surrogate


def test_many_mixes_are_guessed_as_each_is_by_the_surrogate_of_its_heap():
    surrogates = {None: learned(50), HEAP: learned(70)}
    sizes = {(HALF,): [16, 8, 2], (): [16], (HALF, HEAP): [4, 1], (STATES, HALF): [8], (HEAP,): [16, 2]}
    guesses = guesses_of([Mix(mix, np.asarray(some)) for mix, some in sizes.items()], surrogates, [])
    assert [guesses.choices(row) for row in (0, 3, 5)] == [
        (micro_batch_choice(16), HALF), (micro_batch_choice(16),), (micro_batch_choice(1), HALF, HEAP),
    ]  # fmt: skip
    rows = [(mix, size) for mix, some in sizes.items() for size in some]
    for row, (mix, size) in enumerate(rows):
        surrogate = surrogates[HEAP if HEAP in mix else None]
        needs, seconds = surrogate.guess([mix], np.zeros(1, dtype=int), np.asarray([size]))
        assert (guesses.mix(row), guesses.sizes[row]) == (mix, size)
        assert (guesses.needs[row], guesses.seconds[row]) == (needs[0], seconds[0])
    assert guesses.possible.all()
    assert not guesses.traced.any()


def test_what_was_traced_is_known():
    traced = look(8, (HALF,), per_sample=100, seconds=9.0)
    mixes = [Mix((), np.asarray([16, 8])), Mix((HALF,), np.asarray([16, 8]))]
    guesses = guesses_of(mixes, {None: Surrogate(PLAIN)}, [traced, look(4, (HALF,)), look(8, (STATES,))])
    assert guesses.traced.tolist() == [False, False, False, True]
    assert (guesses.needs[3], guesses.seconds[3]) == (traced.need_bytes, 9.0)
