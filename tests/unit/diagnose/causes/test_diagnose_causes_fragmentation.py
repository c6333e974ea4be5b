"""Fragmentation in an error message, in a run and in a prediction."""

from peak_evidence import FRAGMENTED, FULL, MIB, evidence, of_text, shares, tried
from plimsoll.diagnose.causes.fragmentation import CODE, findings


def test_of_a_text_it_is_bounded_by_what_is_unused():
    (finding,) = findings(of_text(FRAGMENTED))
    assert finding.title == "PyTorch holds 4.0 GiB that it does not use, and no block of it has the requested 1.0 GiB"
    assert (finding.code, finding.effect_bytes, finding.effect_high_bytes) == (CODE, None, 4 << 30)
    assert findings(of_text(FULL)) == ()


def test_of_a_text_that_allows_another_cause():
    (finding,) = findings(of_text(FRAGMENTED, likely_cause="other_process", likely_cause_alt="fragmentation"))
    assert finding.title.startswith("perhaps: ")


def test_of_a_run_that_ended_in_it():
    (finding,) = findings(evidence(is_fragmented=True, requested_bytes=64 * MIB))
    assert "the requested 64.0 MiB, in pieces" in finding.evidence[0].text


def test_of_a_prediction():
    seen = evidence(shares=shares(activations=850, fragmentation=150), remedies=(tried("heap", 120),))
    (finding,) = findings(seen)
    assert (str(finding.remedy), finding.effect_bytes) == ("heap=1", 120 * MIB)
    assert findings(evidence(shares=shares(activations=851, fragmentation=149))) == ()
