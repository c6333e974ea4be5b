"""A part of the inputs of `benchmarks/fuzz_explain.py`, which runs a hundred thousand."""

import random

import pytest

from fuzz_inputs import explained_snapshot, explained_text, fuzz, snapshot_inputs, text_inputs


@pytest.mark.parametrize(
    ("inputs", "explained", "number"),
    [(snapshot_inputs, explained_snapshot, 200), (text_inputs, explained_text, 200)],
    ids=["snapshots", "texts"],
)
def test_nothing_but_our_errors_is_raised(tmp_path, inputs, explained, number):
    counts = fuzz(inputs(random.Random(0)), explained, number, tmp_path / "input")
    # Some inputs are valid; most snapshots are not. Otherwise the inputs would test only one case.
    assert counts["explained"] > 20
    assert counts["longest message"] < 500
    assert counts["refused"] > 50 or inputs is text_inputs
