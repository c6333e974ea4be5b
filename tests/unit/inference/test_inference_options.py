"""Invalid options of inference: refused before anything is loaded."""

from pathlib import Path

import pytest

from plimsoll.errors import InputError, OutputError
from plimsoll.inference.options import generation_of, require_known
from plimsoll.models.generation import Generation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("int8", None, "full"), "--dtype int8 is not supported for weights: give one of stored"),
        (("stored", "int3", "full"), "--quantize int3 is not supported"),
        (("stored", "int4", "small"), "--cache small is not supported"),
    ],
)
def test_words_that_there_are_not_are_refused(words, message):
    require_known(Path("a.jsonl"), "bf16", "int4", "offloaded")
    with pytest.raises(InputError, match=message):
        require_known(Path("a.jsonl"), *words)


def test_results_are_not_called_a_table():
    with pytest.raises(OutputError, match="results are JSON lines, but --out a.csv ends in .csv"):
        require_known(Path("a.csv"), "stored", None, "full")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((None, 0.5, 1.0, 0, "full"), "needs --max-new-tokens: give that too"),
        ((None, None, 1.0, 0, "offloaded"), "needs --max-new-tokens: give that too"),
        ((0, None, 1.0, 0, "full"), "generates nothing"),
        ((5, 0.0, 1.0, 0, "full"), "is not a finite number above 0"),
        ((5, float("inf"), 1.0, 0, "full"), "is not a finite number above 0"),
        ((5, None, 0.0, 0, "full"), "is not a probability"),
    ],
)
def test_numbers_without_a_meaning_are_refused(numbers, message):
    with pytest.raises(InputError, match=message):
        generation_of(*numbers)


def test_new_tokens_are_made_only_where_they_are_asked_for():
    assert generation_of(None, None, 1.0, 0, "full") is None
    assert generation_of(5, 0.5, 0.9, 3, "offloaded") == Generation(5, 0.5, 0.9, 3, "offloaded")
