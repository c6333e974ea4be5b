"""The inputs of compression methods."""

from __future__ import annotations

from torch import nn

from plimsoll.compression.base import Shrinker
from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.records.plan import Choice


def test_without_data_there_are_no_batches_and_no_counts():
    assert list(Calibration().batches()) == []
    assert Calibration().token_counts is None
    assert Bundle(nn.Linear(1, 1)).tokenizer is None


class Halves(Shrinker):
    name = "low_rank"
    saves = "nothing"
    tried = ({"share": 0.25}, {"share": 0.5})

    def fault(self, bundle, choice):
        return None if choice.options["share"] <= bundle.model else f"{choice.options['share']} is too much"

    def shrink(self, bundle, choice, calibration):
        raise AssertionError("these tests ask for choices only")


class Milder(Halves):
    easiest = 0
    reads_corpus = True


def test_what_is_not_refused_is_offered_and_else_the_reason_of_the_easiest():
    quarter, half = (Choice(technique="low_rank", options={"share": share}) for share in (0.25, 0.5))
    assert Halves().choices(Bundle(0.5)) == (quarter, half)
    assert Halves().choices(Bundle(0.3)) == (quarter,)
    assert Halves().choices(Bundle(0.1)) == "0.5 is too much"
    assert Milder().choices(Bundle(0.1)) == "0.25 is too much"


def test_options_say_what_is_needed_and_are_checked_before_the_model_is():
    aware, plain = (Choice(technique="low_rank", options={"aware": aware}) for aware in (True, False))
    assert (Halves().needs(aware), Halves().needs(plain)) == ({"batches"}, frozenset())
    assert (Milder().needs(aware), Milder().needs(plain)) == ({"batches", "corpus"}, {"corpus"})
    taylor, activation = (Choice(technique="heads", options={"importance": name}) for name in ("taylor", "activation"))
    assert (Halves().needs(taylor), Halves().needs(activation)) == ({"gradients"}, {"batches"})
    assert Halves().needs(Choice(technique="layers")) == Halves().needs(Choice(technique="heads")) == frozenset()
    assert "`share` 2 is not a share" in Halves().refusal(None, Choice(technique="low_rank", options={"share": 2}))
