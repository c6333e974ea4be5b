"""Flat rows and padded tables, by hand."""

import numpy as np
import pytest

from plimsoll.data.samples import ragged


@pytest.mark.parametrize(
    ("lengths", "multiple"),
    [([117] * 9, 8), ([116] * 9, 4), ([50, 49, 51], 4), ([49, 49, 51], 2), ([17], 2), ([16], 1), ([0], 1), ([], 8)],
)
def test_rows_are_rounded_up_to_what_costs_little(lengths: list[int], multiple: int):
    assert ragged.pad_multiple_for(np.array(lengths, np.int64)) == multiple


def test_rows_end_to_end():
    lengths = np.array([3, 0, 2])
    assert ragged.positions(lengths).tolist() == [0, 1, 2, 0, 1]
    assert ragged.places(np.array([10, 50, 90]), lengths).tolist() == [10, 11, 12, 90, 91]


def test_a_table_is_filled_row_by_row():
    inside = ragged.inside(np.array([2, 3]), 4)
    assert ragged.padded(np.arange(1, 6), inside, -7).tolist() == [[1, 2, -7, -7], [3, 4, 5, -7]]
