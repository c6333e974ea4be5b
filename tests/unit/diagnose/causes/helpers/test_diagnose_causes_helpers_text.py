"""Likely and possible causes of an error message."""

from plimsoll.diagnose.causes.helpers.text import is_possible, perhaps
from plimsoll.records.oom_text import OomText

EVENT = OomText(kind="a", is_oom=True, likely_cause="other_process", likely_cause_alt="fragmentation")


def test_the_other_cause_is_possible_too():
    assert is_possible(EVENT, "other_process")
    assert is_possible(EVENT, "fragmentation")
    assert not is_possible(EVENT, "true_capacity")
    assert not is_possible(EVENT.model_copy(update={"is_oom": False}), "fragmentation")


def test_a_title_says_which_is_likely():
    assert (perhaps(EVENT, "other_process"), perhaps(EVENT, "fragmentation")) == ("", "perhaps: ")
