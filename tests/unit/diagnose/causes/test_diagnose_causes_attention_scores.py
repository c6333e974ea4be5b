"""Attention scores, with numbers calculated by hand."""

import pytest

from peak_evidence import LENGTH, MIB, SCORES, evidence, holding, tried
from plimsoll.diagnose.causes.attention_scores import findings

SQUARE = f"float32[8, {LENGTH}, {LENGTH}]"


def test_the_size_and_the_module():
    (finding,) = findings(evidence(holdings=(SCORES,), remedies=(tried("checkpointing"), tried("attention", 190))))
    assert finding.title == "attention scores of 256 x 256 positions: 200.0 MiB, 17% of the peak"
    assert finding.place == "net.attn, net.py:7"
    assert (str(finding.remedy), finding.effect_bytes) == ("attention=1", 190 * MIB)
    assert finding.evidence[1].text == "4 x float32[8, 4, 256, 256], activations"


def test_of_three_dimensions_only_those_of_an_attention_module_are():
    """Hidden states as wide as the text is long have the same shape."""
    assert findings(evidence(holdings=(holding(200, "activations", SQUARE, op="bmm", module="self_attn"),)))
    assert findings(evidence(holdings=(holding(200, "activations", SQUARE, op="bmm", module="mlp"),))) == ()


@pytest.mark.parametrize(
    "one",
    [
        holding(200, "activations", f"float32[8, 4, {LENGTH}, {LENGTH}]", op="clone", module="attn"),
        holding(200, "activations", f"float32[8, 4, {LENGTH}, 64]", op="_safe_softmax"),
        holding(200, "parameters", f"float32[8, 4, {LENGTH}, {LENGTH}]", op="mul"),
        holding(200, "activations", f"float32[{LENGTH}, {LENGTH}]", op="mul"),
    ],
    ids=["queries", "heads", "weights", "a matrix"],
)
def test_what_is_none(one):
    assert findings(evidence(holdings=(one,))) == ()


def test_without_a_length_nothing_is_found():
    assert findings(evidence(holdings=(SCORES,), sequence_length=None)) == ()
