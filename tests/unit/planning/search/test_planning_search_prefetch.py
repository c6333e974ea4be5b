"""Traces requested ahead, in the order of the search; each request assumes that the guesses before it were right."""

from collections.abc import Callable

import numpy as np

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.planning.search.prefetch import as_guessed, asked_in_turn, not_traced
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import Choices
from worlds import BATCH_SIZE, MadeUp, World

A, B, C = ((micro_batch_choice(size),) for size in (1, 2, 4))
RECOMPUTE = Choice(technique="recompute", options={"level": 0})


def searching(
    *combinations: Choices, chosen: Choices, evaluation: Evaluation
) -> tuple[Callable[[], object], list, dict]:
    """Return a search that evaluates these combinations in order and chooses the given one at full length."""
    known: list[Choices] = []
    held: dict[Choices, Evaluation] = {}

    def go_on() -> None:
        for combination in combinations:
            if combination not in known:
                not_traced(combination)
            if combination == chosen:
                held[combination] = evaluation

    return go_on, known, held


def test_each_is_asked_for_after_what_came_before_is_as_guessed() -> None:
    evaluation = World([]).evaluate(A)
    go_on, known, held = searching(A, B, C, chosen=B, evaluation=evaluation)
    assert list(asked_in_turn(go_on, known.append, held)) == [(A, False), (B, False), (B, True), (C, False)]
    assert known == [A, B, C]


def test_what_is_not_wanted_is_not_searched_for() -> None:
    go_on, known, held = searching(A, B, C, chosen=C, evaluation=World([]).evaluate(A))
    asked = asked_in_turn(go_on, known.append, held)
    assert known == []
    assert next(asked) == (A, False)
    assert known == []
    assert next(asked) == (B, False)
    assert known == [A]


def test_a_guessed_evaluation_has_peak_and_time_of_the_guess_and_parts_of_the_most_similar_one() -> None:
    world = World([MadeUp("recompute", (4,), seconds=(0.5,))])
    plain, small = world.evaluate((micro_batch_choice(BATCH_SIZE),)), world.evaluate((micro_batch_choice(2),))
    learned = world.evaluate((micro_batch_choice(2), RECOMPUTE))
    surrogate = Surrogate([plain, small])
    surrogate.learn_effect(RECOMPUTE, learned, small, frozenset({"activations"}))
    choices = (micro_batch_choice(8), RECOMPUTE)
    need, seconds = surrogate.guess([(RECOMPUTE,)], np.zeros(1, dtype=int), np.asarray([8]))
    evaluation = as_guessed(choices, surrogate, [plain, small, learned])
    assert (evaluation.choices, evaluation.micro_batch, evaluation.fits) == (choices, 8, True)
    assert (evaluation.need_bytes, evaluation.seconds) == (need[0], seconds[0])
    assert (evaluation.parts, evaluation.phases) == (learned.parts, learned.phases)


def test_a_guess_below_zero_becomes_a_possible_evaluation() -> None:
    world = World([])
    surrogate = Surrogate([world.evaluate((micro_batch_choice(size),)) for size in (16, 2)])
    surrogate.guess = lambda *asked: (np.asarray([-5.0]), np.asarray([-0.1]))  # type: ignore[method-assign]
    evaluation = as_guessed((micro_batch_choice(4),), surrogate, [world.evaluate((micro_batch_choice(16),))])
    assert (evaluation.need_bytes, evaluation.seconds) == (1, 0.0)
