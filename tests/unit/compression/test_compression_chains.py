"""The most promising chains, estimated from the effect of each choice alone, by hand."""

from __future__ import annotations

import math

import pytest

from plimsoll.compression.chains import Guess, Single, guesses, smallest, varied
from plimsoll.records.plan import Choice

LAYERS, HEADS, INT8, INT4 = (Choice(technique=name) for name in ("layers", "heads", "int8", "int4"))
SINGLES = [
    Single(LAYERS, 0.5, 0.4, 0, False),
    Single(HEADS, 0.8, 0.1, 1, False),
    Single(INT8, 0.3, 0.01, 2, True),
    Single(INT4, 0.2, 0.5, 3, True),
]


def test_a_chain_multiplies_shares_and_adds_losses():
    best = guesses(SINGLES, 0.25)[0]
    assert best == Guess((HEADS, INT8), pytest.approx(0.24), pytest.approx(0.11))


def test_all_that_fit_are_listed_the_least_loss_first_and_none_that_needs_less():
    found = [one.chain for one in guesses(SINGLES, 0.25)]
    # Layers with int8 have a share of 0.15, so adding heads is unnecessary. int4 alone has 0.2.
    assert found == [(HEADS, INT8), (LAYERS, INT8), (INT4,)]


def test_what_changes_values_is_last_and_two_of_it_are_tried_too():
    found = [one.chain for one in guesses(SINGLES, 0.09)]
    assert found == [(INT8, INT4), (LAYERS, HEADS, INT4)]
    assert guesses(SINGLES, 0.02) == []


def test_what_is_guessed_to_be_a_little_too_large_does_not_hide_what_is_smaller():
    vocabulary = Single(Choice(technique="vocabulary"), 0.9, 0.0, 0, False)
    found = [one.chain for one in guesses([vocabulary, Single(INT8, 0.26, 0.001, 2, True), SINGLES[3]], 0.25)]
    assert found == [(vocabulary.choice, INT8), (INT8,), (INT4,)]


def test_what_fits_at_the_border_is_taken_for_a_guess_and_what_is_sure_to_is_enough():
    border, sure = 0.5 * 1.1, 0.5 / 1.1  # a guess may be wrong by a tenth
    assert [one.share for one in guesses([Single(HEADS, border, 0.1, 1, False)], 0.5)] == [border]
    assert guesses([Single(HEADS, math.nextafter(border, 1), 0.1, 1, False)], 0.5) == []
    found = guesses([Single(HEADS, sure, 0.1, 1, False), Single(INT8, 0.5, 0.1, 2, True)], 0.5)
    assert [one.chain for one in found] == [(HEADS,), (INT8,)]


def test_of_equal_losses_the_smaller_is_first_and_of_equal_sizes_what_loses_less():
    twins = [Single(HEADS, 0.5, 0.1, 1, False), Single(LAYERS, 0.4, 0.1, 0, False)]
    assert [one.chain for one in guesses(twins, 0.5)] == [(LAYERS,), (HEADS,)]
    twins = [Single(HEADS, 0.5, 0.3, 1, False), Single(LAYERS, 0.5, 0.1, 0, False)]
    assert [one.chain for one in smallest(twins)] == [(LAYERS, HEADS), (LAYERS,), (HEADS,)]


def test_a_chain_has_three_methods_that_change_shapes_and_two_that_change_values():
    shapes = [Single(Choice(technique=f"shape-{order}"), 0.5, 0.1, order, False) for order in range(5)]
    values = [Single(Choice(technique=f"value-{order}"), 0.5, 0.1, order, True) for order in range(5, 9)]
    longest = smallest([*shapes, *values])[0].chain
    assert [one.technique.partition("-")[0] for one in longest] == ["shape"] * 3 + ["value"] * 2


def test_one_choice_of_a_method():
    singles = [SINGLES[0], Single(Choice(technique="layers", options={"keep": 1}), 0.25, 2.0, 0, False)]
    assert [one.chain for one in guesses(singles, 0.3)] == [(singles[1].choice,)]
    assert guesses(singles, 0.2) == []


def test_what_did_good_alone_is_not_counted_on_and_what_is_no_number_not_taken():
    better = Single(HEADS, 0.5, -3.0, 1, False)
    assert guesses([better], 0.5)[0].lost == 0
    assert guesses([Single(HEADS, 0.5, math.nan, 1, False)], 0.5) == []


def test_of_the_same_methods_two_are_taken():
    same = [Guess((Choice(technique="layers", options={"keep": keep}),), 0.1, 0.1) for keep in range(4)]
    other = Guess((INT4,), 0.2, 9.0)
    assert varied([*same, other], 3) == [*same[:2], other]
    assert varied([*same, other], 1) == same[:1]
    assert varied([*same, other], 9, most_alike=3) == [*same[:3], other]
    assert varied([other, *same], 1) == [other]


def test_the_smallest_chain_has_all_there_is():
    assert smallest(SINGLES)[0].chain == (LAYERS, HEADS, INT8, INT4)
    assert smallest(SINGLES)[-1].chain == (HEADS,)
