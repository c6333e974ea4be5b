"""A strategy that fits, and several strategies of which one fits."""

from strategy_records import none_fits, strategies


def test_a_strategy_fits_that_is_possible_and_needs_no_other_budget():
    assert [strategy.fits for strategy in strategies().strategies] == [False, True, False]
    assert strategies().fits
    assert not none_fits().fits
