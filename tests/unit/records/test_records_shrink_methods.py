"""Options with defaults, and what is wrong with them."""

from __future__ import annotations

from plimsoll.weights.shrink._options import count_fault, options_of, share_fault, unknown_option, value_fault

from plimsoll.records.plan import Choice


def test_what_is_given_takes_the_place_of_a_default():
    assert options_of(Choice(technique="a", options={"x": 2}), {"x": 1, "y": 3}) == {"x": 2, "y": 3}


def test_a_reason_names_the_option_also_where_it_is_the_only_one():
    assert Choice(technique="float8", options={"dynamic": True}).in_full == "float8(dynamic=true)"
    assert Choice(technique="int8").in_full == "int8"


def test_faults_say_what_can_be_given():
    choice = Choice(technique="a", options={"z": 2})
    assert unknown_option(choice, {"z": 1}) is None
    assert unknown_option(choice, {"x": 1}) == "`a` has no option `z` (2): it takes `x`; leave it out"
    assert "it takes no options" in (unknown_option(choice, {}) or "")
    assert value_fault("dynamic", True, (False, True)) is None
    assert value_fault("dynamic", 1, (False, True)) == "`dynamic` 1 is none there is: give one of false, true"
    assert share_fault("share", 0.5) is None
    assert all(share_fault("share", wrong) for wrong in (0, 1, -1, True, "half"))
    assert count_fault("rank", 3) is None
    assert all(count_fault("rank", wrong) for wrong in (0, 2.5, True, "many"))
