"""What every technique of the registry says of itself, and what a setting is without being told."""

from typing import get_args

import pytest

from plimsoll.records.plan import Numerics
from plimsoll.records.trace import Category
from plimsoll.techniques import TECHNIQUES, Setting


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_a_technique_says_what_it_is_in_the_words_of_the_records(technique):
    assert technique.numerics in get_args(Numerics)
    assert technique.reaches <= set(get_args(Category))
    assert (type(technique.is_for_the_run), type(technique.may_be_faster)) == (bool, bool)
    assert technique.summary
    assert not technique.summary.endswith(".")
    assert technique.name.isidentifier()


def test_a_setting_allows_nothing_and_leaves_nothing_open_by_itself():
    setting = Setting("cpu", batch_size=4)
    assert (setting.allow, setting.precision, setting.lengths_vary, setting.trace) == (frozenset(), "fp32", False, None)
