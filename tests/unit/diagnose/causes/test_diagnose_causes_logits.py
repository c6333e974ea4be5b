"""Logits of 300 MiB in a peak of 1,200, of which 200 exist before the model."""

import pytest

from peak_evidence import LOGITS, MIB, VOCABULARY, evidence, holding, tried
from plimsoll.diagnose.causes.logits import findings


def test_the_size_the_line_and_the_remedy_that_was_tried():
    (finding,) = findings(evidence(holdings=(LOGITS,), remedies=(tried("chunked_loss", 250),)))
    assert finding.title == "the scores of all 5,000 tokens of the vocabulary: 300.0 MiB, 25% of the peak"
    assert finding.place == "net, loss.py:3"
    assert (str(finding.remedy), finding.effect_bytes) == ("chunked_loss=1", 250 * MIB)


def test_what_was_not_tried_is_a_sentence():
    (finding,) = findings(evidence(holdings=(LOGITS,)))
    assert "docs/techniques/chunked_loss.md" in finding.remedy


@pytest.mark.parametrize(
    "one",
    [
        holding(300, "parameters", f"float32[512, {VOCABULARY}]"),
        holding(300, "temporaries", f"float32[{VOCABULARY}]"),
        holding(300, "temporaries", "float32[512, 4999]"),
        holding(50, "temporaries", f"float32[512, {VOCABULARY}]"),
    ],
    ids=["weights", "a bias", "another width", "small"],
)
def test_what_is_none(one):
    assert findings(evidence(holdings=(one,))) == ()


def test_without_a_vocabulary_nothing_is_found():
    assert findings(evidence(holdings=(LOGITS,), vocab_size=None)) == ()
