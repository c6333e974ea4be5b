"""Embedding tables, with numbers calculated by hand."""

from peak_evidence import MIB, TABLE, VOCABULARY, evidence, holding, shares
from plimsoll.diagnose.causes.embeddings import findings


def test_parameters_gradients_and_states_count():
    gradient = holding(100, "gradients", f"float32[{VOCABULARY}, 512]")
    (finding,) = findings(evidence(holdings=(TABLE, gradient)))
    assert finding.effect_bytes == 500 * MIB
    assert "tokenizer.vocab_size" in finding.remedy


def test_a_category_of_their_own():
    (finding,) = findings(evidence(shares=shares(embeddings=300, activations=700)))
    assert finding.effect_bytes == 300 * MIB


def test_what_is_none():
    logits = holding(400, "activations", f"float32[{VOCABULARY}, 512]")
    assert findings(evidence(holdings=(logits, holding(400, "parameters", f"float32[512, {VOCABULARY}]")))) == ()
    assert findings(evidence(holdings=(TABLE,), vocab_size=None)) == ()
