"""When a way fits, and when one of several does."""

from way_records import none_fits, ways


def test_a_way_fits_that_is_possible_and_needs_no_other_budget():
    assert [way.fits for way in ways().ways] == [False, True, False]
    assert ways().fits
    assert not none_fits().fits
