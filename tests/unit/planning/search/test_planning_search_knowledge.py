"""The knowledge of a search: evaluated combinations, the best guess, and a copy that learns independently."""

import pytest

from plimsoll.planning.search.choices import AvailableChoices
from plimsoll.planning.search.knowledge import Known
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from worlds import BATCH_SIZE, MadeUp, World

SIZES = (16, 8, 4, 2, 1)
WEAK, STRONG = (Choice(technique="recompute", options={"level": level}) for level in (0, 1))


@pytest.fixture
def known(inhabited):
    """Return knowledge of plain training and of one technique with its strongest option."""
    world = inhabited(World([MadeUp("recompute", (2, 4), seconds=(0.1, 0.2))], pass_seconds=0.1))
    found = Known(AvailableChoices((), SIZES, {"recompute": (WEAK, STRONG)}, (), ()), frozenset(), lambda choices: True)
    evaluations = [
        world.evaluate((micro_batch_choice(size), *combination))
        for size, combination in ((16, ()), (2, ()), (2, (STRONG,)))
    ]
    found.evaluations = {evaluation.choices: evaluation for evaluation in evaluations}
    found.surrogates = {None: Surrogate(evaluations[:2])}
    found.surrogates[None].learn_effect(STRONG, evaluations[2], evaluations[1], frozenset({"activations"}))
    found.learned["recompute"] = [STRONG]
    return found


def test_combinations_are_made_anew_when_more_is_learned(known):
    assert [combination.choices for combination in known.combinations()] == [(), (STRONG,)]
    assert known.combinations() is known.combinations()
    known.learned["recompute"] = [STRONG, *known.suppose([WEAK], STRONG)]
    assert [combination.choices for combination in known.combinations()] == [(), (STRONG,), (WEAK,)]
    assert known.only_guessed == {WEAK}
    assert [combination.choices for combination in known.learned_combinations()] == [(), (STRONG,)]
    assert len(known.telling_combinations()) == 3


def test_the_best_guess_is_the_fastest_that_fits_with_headroom(known):
    limit_bytes = known.evaluations[(micro_batch_choice(16),)].need_bytes
    assert known.best_guess([], limit_bytes) is None
    assert known.best_guess(known.combinations(), 1) is None
    assert known.best_guess(known.combinations(), limit_bytes) == (micro_batch_choice(BATCH_SIZE),)
    assert known.best_guess(known.combinations(), limit_bytes - 20) == (micro_batch_choice(8),)


def test_a_copy_takes_guesses_by_itself(known):
    known.learned["recompute"] = [STRONG, *known.suppose([WEAK], STRONG)]
    copied, choices = known.copied(), (micro_batch_choice(8), WEAK)
    copied.take_guess(choices)
    assert (choices in copied.evaluations, choices in known.evaluations) == (True, False)
    assert (copied.only_guessed, known.only_guessed) == (set(), {WEAK})
    copied.surrogates[None].correct(copied.evaluations[choices])
    assert not known.surrogates[None]._off
    assert WEAK in known.surrogates[None]._supposed
