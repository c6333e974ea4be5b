"""Vectors in single precision and in half: what does not fit is a fault of its row."""

import numpy as np

from plimsoll.embeddings.formats import Fault, Rows, in_precision, rows_of


def test_doubles_are_rounded_to_single_precision():
    rows = rows_of(np.array([[0.1, 1 + 2**-24 + 2**-40], [16777217.0, -0.0]]))
    assert rows.matrix.dtype == np.float32
    assert rows.matrix.tolist() == [[float(np.float32(0.1)), 1 + 2**-23], [16777216.0, 0.0]]
    assert np.signbit(rows.matrix[1, 1])
    assert rows.faults == ()


def test_what_is_not_finite_in_single_precision_is_a_fault_behind_those_given():
    given = Fault("number", 0, "'x' is no number")
    rows = rows_of(np.array([[0, 0], [1, np.nan], [1, 2], [-1e39, 0]]), (given,))
    assert rows.faults == (given, Fault("finite", 1, "it holds nan"), Fault("finite", 3, "it holds -inf"))


def test_single_precision_is_kept_as_it_is():
    rows = rows_of(np.array([[1e5, np.nan]]))
    assert in_precision(rows, "float32") is rows


def test_what_is_too_large_for_half_precision_is_a_fault_once():
    rows = in_precision(rows_of(np.array([[65504.0], [65520.0], [np.inf]])), "float16")
    assert rows.faults == (
        Fault("finite", 2, "it holds inf"),
        Fault("finite", 1, "it holds numbers that are inf in float16"),
    )
    assert rows.matrix.dtype == np.float32
    assert in_precision(Rows(np.ones((1, 1), np.float32)), "float16").faults == ()
