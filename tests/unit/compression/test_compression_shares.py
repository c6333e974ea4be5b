"""The option for a share, and invalid options."""

from __future__ import annotations

import pytest

from plimsoll.compression.shares import (
    importance_of,
    num_removed,
    removal_fault,
    share_of,
)
from plimsoll.records.plan import Choice
from plimsoll.records.shrink import IMPORTANCES


def test_without_options_a_quarter_goes_by_magnitude():
    bare = Choice(technique="heads")
    assert (share_of(bare), importance_of(bare)) == (0.25, IMPORTANCES[0])
    assert share_of(Choice(technique="layers")) == 0.25  # this method has no default share


@pytest.mark.parametrize(("num_parts", "share", "removed"), [(12, 0.25, 3), (12, 0.3, 4), (8, 0.05, 0), (3, 0.9, 3)])
def test_a_share_is_to_the_nearest_part(num_parts: int, share: float, removed: int):
    assert num_removed(num_parts, share) == removed


@pytest.mark.parametrize(
    ("num_parts", "share", "said"),
    [
        (12, 0.01, "a share of 0.01 of 12 heads is none of them: give a share from 0.0833 to 0.917"),
        (3, 0.9, "a share of 0.9 of 3 heads is all of them: give a share from 0.333 to 0.667"),
        (1, 0.5, "the model has 1 heads, so none can be removed: leave this out"),
        (12, 0.25, None),
    ],
)
def test_none_and_all_are_refused(num_parts: int, share: float, said: str | None):
    assert removal_fault("heads", num_parts, share) == said
