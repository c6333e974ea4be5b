"""Guesses from handmade evaluations, whose expected sums can be checked by mental arithmetic."""

import numpy as np
import pytest

from plimsoll.planning.search.evaluation import Evaluation, PhasePeak
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice, Duration, micro_batch_choice
from plimsoll.records.prediction import Estimate

HALF, STATES, NONE = (Choice(technique=name) for name in ("half", "states", "none"))
BEYOND = 50  # bytes that a process needs besides its live tensors


def evaluate(size, combination=(), *, per_sample=10, update=200, seconds=1.0, beyond=BEYOND):
    """Return an evaluation with 100 bytes plus some per sample in forward, and `update` bytes in the update."""
    phases = {"forward": PhasePeak(100, per_sample * size), "optimizer": PhasePeak(update, 0)}
    need = max(100 + per_sample * size, update) + beyond
    return Evaluation(
        (micro_batch_choice(size), *combination),
        size,
        Estimate(likely_bytes=need, low_bytes=need, high_bytes=need),
        True,
        Duration(likely_seconds=seconds, low_seconds=seconds, high_seconds=seconds),
        phases,
        {},
    )


PLAIN = [evaluate(2, seconds=1.4), evaluate(16, seconds=1.1)]


def needs(surrogate, combination, *sizes):
    return surrogate.guess([combination], np.zeros(len(sizes), dtype=int), np.asarray(sizes))[0].tolist()


def times(surrogate, combination, *sizes):
    return surrogate.guess([combination], np.zeros(len(sizes), dtype=int), np.asarray(sizes))[1].tolist()


def test_between_two_evaluations_and_beyond_them_a_phase_grows_linearly():
    """Forward needs 100 + 10 per sample and the update 200, so they are equal at 10 samples."""
    assert needs(Surrogate(PLAIN), (), 1, 2, 10, 12, 16, 32) == [250, 250, 250, 270, 310, 470]


def test_the_time_of_a_pass_is_in_a_line_over_its_samples():
    """For 16 samples, 8 passes take 1.4 s and one takes 1.1 s, so each of two passes takes 0.175 to 1.1 s."""
    of_eight = 2 * (0.175 + 6 / 14 * 0.925)
    assert times(Surrogate(PLAIN), (), 2, 8, 9, 16) == pytest.approx([1.4, of_eight, of_eight, 1.1])


def test_a_pass_smaller_than_any_evaluated_one_takes_between_its_part_and_all_of_that_time():
    """On the line through both points a single sample would take a negative time."""
    steep = Surrogate([evaluate(32, seconds=1.0), evaluate(64, seconds=1.5)])  # 0.5 s for 32 samples, 1.5 for 64
    assert times(steep, (), 1, 16, 32) == [1.0, 1.0, 1.0]
    level = Surrogate([evaluate(32, seconds=1.0), evaluate(64, seconds=0.5)])  # 0.5 s for both: bound by calls
    assert times(level, (), 16, 1) == [2.0, 32.0]


def test_a_single_evaluation_is_taken_for_all_sizes():
    assert needs(Surrogate([PLAIN[0]]), (), 1, 2, 16) == [250, 250, 250]


def test_effects_add_up_within_a_phase_and_the_largest_phase_counts():
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=5, seconds=1.3), PLAIN[1])
    surrogate.learn_effect(STATES, evaluate(16, (STATES,), update=120, seconds=1.5), PLAIN[1])
    assert needs(surrogate, (HALF,), 16) == [250]  # forward 180, so the update
    assert needs(surrogate, (STATES,), 16) == [310]  # forward 260
    assert needs(surrogate, (HALF, STATES), 16, 8) == [230, 190]  # 180 and 140 in forward
    assert times(surrogate, (HALF, STATES), 16) == pytest.approx([1.1 + 0.2 + 0.4])


def test_what_is_done_in_every_pass_takes_its_share_of_them():
    """It was learned at 2 samples, where passes take 1.4 s and the technique half of that: half of 1.1 s at 16."""
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(2, (HALF,), per_sample=5, seconds=2.1), PLAIN[0], frozenset({"activations"}))
    surrogate.learn_effect(STATES, evaluate(2, (STATES,), update=120, seconds=1.6), PLAIN[0])
    surrogate.interpolate(NONE, HALF, bytes_share=0.5, seconds_share=0.5)
    assert times(surrogate, (HALF, STATES), 2, 16) == pytest.approx([1.4 + 0.7 + 0.2, 1.1 + 0.55 + 0.2])
    assert times(surrogate, (NONE,), 16) == pytest.approx([1.1 + 0.275])


def test_what_grows_is_saved_for_each_sample():
    """It was learned at 2 samples, where the update hides it, and is applied at 16 samples."""
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(2, (HALF,), per_sample=4), PLAIN[0])
    assert needs(surrogate, (HALF,), 16, 32) == [250, 100 + 4 * 32 + BEYOND]


def test_of_what_grows_each_choice_leaves_a_share():
    """Savings of a half and of a fifth multiply to a tenth, and the rest is never negative."""
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=5), PLAIN[1])
    surrogate.learn_effect(NONE, evaluate(16, (NONE,), per_sample=2), PLAIN[1])
    assert needs(surrogate, (HALF, NONE), 160) == [100 + 160 + BEYOND]


def test_what_two_choices_take_from_one_category_is_taken_once():
    """Of the savings of activations, a half and a fifth, the rest is a fifth; the slower technique moves half."""
    surrogate, activations = Surrogate(PLAIN), frozenset({"activations"})
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=5, seconds=1.3), PLAIN[1], activations)
    surrogate.learn_effect(NONE, evaluate(16, (NONE,), per_sample=2, seconds=1.9), PLAIN[1], activations)
    assert needs(surrogate, (HALF, NONE), 160) == [100 + 2 * 160 + BEYOND]
    assert times(surrogate, (HALF, NONE), 16) == pytest.approx([1.1 + 0.2 + 0.8 / 2])


def test_what_two_choices_do_together_is_learned_from_a_trace_of_both():
    """Each alone halves the growing part; both together leave a tenth of it and are faster than either."""
    surrogate, activations = Surrogate(PLAIN), frozenset({"activations"})
    for choice in (HALF, NONE):
        surrogate.learn_effect(choice, evaluate(16, (choice,), per_sample=5, seconds=1.5), PLAIN[1], activations)
    both = evaluate(16, (HALF, NONE), per_sample=1, update=150, seconds=1.2)
    surrogate.learn_pair(HALF, NONE, both)
    assert needs(surrogate, (HALF, NONE), 16, 160) == [150 + BEYOND, 100 + 160 + BEYOND]
    assert times(surrogate, (HALF, NONE), 16) == pytest.approx([1.2])
    assert needs(surrogate, (HALF,), 160) == [100 + 5 * 160 + BEYOND]


def test_what_is_in_every_plain_evaluation_has_no_effect_of_its_own():
    base = [evaluate(2, (NONE,)), evaluate(16, (NONE,))]
    surrogate = Surrogate(base)
    assert needs(surrogate, (NONE,), 16) == [310]


def test_a_share_of_a_choice_has_that_share_of_its_effect():
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=2, seconds=1.5), PLAIN[1])
    some = Choice(technique="half", options={"blocks": "every 2"})
    surrogate.interpolate(some, HALF, 0.5, 0.25)
    assert needs(surrogate, (some,), 32) == [100 + 6 * 32 + BEYOND]
    assert times(surrogate, (some,), 16) == pytest.approx([1.2])


def test_an_evaluation_of_a_combination_corrects_it_and_similar_ones():
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=5, seconds=1.3), PLAIN[1])
    surrogate.learn_effect(STATES, evaluate(16, (STATES,), update=120, seconds=1.5), PLAIN[1])
    surrogate.correct(evaluate(16, (HALF, STATES), per_sample=5, update=120, seconds=2.0, beyond=BEYOND + 8))
    assert needs(surrogate, (HALF, STATES), 16, 8) == [238, 198]
    assert times(surrogate, (HALF, STATES), 16) == pytest.approx([2.0])
    assert needs(surrogate, (HALF,), 16) == [258]  # one choice away
    others = tuple(Choice(technique=name) for name in "abc")
    assert needs(surrogate, others, 16) == [310]  # five away: it is unknown
    surrogate.correct(evaluate(16, (HALF,), per_sample=5, seconds=1.3))
    assert needs(surrogate, (HALF,), 16) == [250]  # the nearest evaluation counts more


def test_what_saves_neither_time_nor_memory_in_any_phase_is_of_no_use():
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(NONE, evaluate(16, (NONE,), seconds=1.1), PLAIN[1])
    assert not surrogate.is_useful(NONE)
    assert surrogate.is_free(NONE)
    surrogate.learn_effect(STATES, evaluate(16, (STATES,), update=120, seconds=1.5), PLAIN[1])
    assert surrogate.is_useful(STATES)  # although the peak, which is in forward, stays
    assert not surrogate.is_free(STATES)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), seconds=0.9), PLAIN[1])
    assert surrogate.is_useful(HALF)


def test_what_comes_on_top_is_left_in_proportion_and_never_added_in_it():
    """The extra need is 40 bytes for 2 samples and 400 for 16: at 16 a tenth of it remains, or 100 bytes are added."""
    plain = [evaluate(2, beyond=40), evaluate(16, beyond=400)]
    surrogate = Surrogate(plain)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), beyond=40), plain[1])
    surrogate.learn_effect(STATES, evaluate(16, (STATES,), beyond=500), plain[1])
    assert needs(surrogate, (HALF,), 2, 16) == [200 + 4, 260 + 40]
    assert needs(surrogate, (STATES,), 2, 16) == [200 + 140, 260 + 500]
    assert needs(surrogate, (HALF, STATES), 16) == [260 + 140]


def test_what_moves_parameters_takes_its_time_in_each_pass():
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), seconds=1.2), PLAIN[1], frozenset({"parameters"}))
    assert times(surrogate, (HALF,), 16, 8, 2) == pytest.approx([1.2, times(Surrogate(PLAIN), (), 8)[0] + 0.2, 2.2])


def test_what_is_supposed_of_a_weaker_choice_is_corrected_by_the_first_combination_with_it():
    """It was assumed to save as much in half the time, but saves half as much in a fifth of it."""
    surrogate = Surrogate(PLAIN)
    surrogate.learn_effect(HALF, evaluate(16, (HALF,), per_sample=2, seconds=1.6), PLAIN[1])
    surrogate.learn_effect(STATES, evaluate(16, (STATES,), update=120, seconds=1.5), PLAIN[1])
    surrogate.suppose(NONE, HALF, may_be_faster=False)
    assert needs(surrogate, (NONE,), 160) == needs(surrogate, (HALF,), 160)
    assert times(surrogate, (NONE,), 16) == pytest.approx([1.35])
    surrogate.correct(evaluate(16, (NONE, STATES), per_sample=6, update=120, seconds=1.6))
    assert needs(surrogate, (NONE,), 160) == [100 + 6 * 160 + BEYOND]
    assert times(surrogate, (NONE,), 16) == pytest.approx([1.2])
    surrogate.suppose(NONE, HALF, may_be_faster=True)
    assert times(surrogate, (NONE,), 16)[0] < 1.1
    surrogate.correct(evaluate(16, (NONE,), seconds=9.0))
    assert times(surrogate, (NONE,), 16)[0] == pytest.approx(9.0)  # in this combination only
