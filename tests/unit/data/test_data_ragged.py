"""Flat rows and padded tables, by hand."""

import numpy as np

from plimsoll.data import ragged


def test_rows_end_to_end():
    lengths = np.array([3, 0, 2])
    assert ragged.positions(lengths).tolist() == [0, 1, 2, 0, 1]
    assert ragged.places(np.array([10, 50, 90]), lengths).tolist() == [10, 11, 12, 90, 91]


def test_a_table_is_filled_row_by_row():
    inside = ragged.inside(np.array([2, 3]), 4)
    assert ragged.padded(np.arange(1, 6), inside, -7).tolist() == [[1, 2, -7, -7], [3, 4, 5, -7]]
