"""What methods are given."""

from __future__ import annotations

from torch import nn

from plimsoll.weights.shrink import Calibration, Subject


def test_without_data_there_are_no_batches_and_no_counts():
    assert list(Calibration().batches()) == []
    assert Calibration().token_counts is None
    assert Subject(nn.Linear(1, 1)).tokenizer is None
