"""Other processes in an error message."""

from peak_evidence import FULL, OTHERS, evidence, of_text
from plimsoll.diagnose.causes.other_process import findings


def test_what_they_hold_bounds_what_stopping_them_frees():
    (finding,) = findings(of_text(OTHERS))
    assert finding.title == "other processes hold 20.0 GiB of the device's memory"
    assert (finding.code, finding.effect_high_bytes) == ("nvidia-smi", 20 << 30)


def test_a_size_that_is_not_stated_is_not_made_up():
    (finding,) = findings(of_text(OTHERS, other_process=None))
    assert finding.title == "other processes hold the device's memory"
    assert (finding.effect_high_bytes, finding.evidence[0].known) == (None, "assumed")


def test_what_is_none():
    assert findings(of_text(FULL)) == ()
    assert findings(evidence()) == ()
