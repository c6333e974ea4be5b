"""What methods are given."""

from __future__ import annotations

from torch import nn

from plimsoll.compression.base import possible
from plimsoll.compression.methods import Calibration, Bundle
from plimsoll.records.plan import Choice


def test_without_data_there_are_no_batches_and_no_counts():
    assert list(Calibration().batches()) == []
    assert Calibration().token_counts is None
    assert Bundle(nn.Linear(1, 1)).tokenizer is None


def test_what_is_not_refused_is_possible_and_else_the_last_reason_is_given():
    class Halves:
        def refusal(self, bundle, choice):
            return None if choice.options["share"] <= bundle.model else f"{choice.options['share']} is too much"

    choices = [Choice(technique="halves", options={"share": share}) for share in (0.25, 0.5)]
    assert possible(Halves(), Bundle(0.5), choices) == tuple(choices)
    assert possible(Halves(), Bundle(0.3), choices) == (choices[0],)
    assert possible(Halves(), Bundle(0.1), choices) == "0.5 is too much"
