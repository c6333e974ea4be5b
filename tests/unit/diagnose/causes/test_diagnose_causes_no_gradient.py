"""Parameters that should be trained but get no gradient."""

from dataclasses import replace

from evidence_records import evidence
from plimsoll.diagnose.causes.no_gradient import findings
from plimsoll.step.missing_gradients import Cause, Unreached


def test_they_are_named_with_what_to_do():
    one = Unreached(("a", "b", "c", "d"), 9, 5, Cause("their modules are not called", "call them"))
    (finding,) = findings(replace(evidence(), unreached=(one,)))
    assert (finding.cause, finding.remedy, finding.effect_bytes) == ("no_gradient", "call them", None)
    said = "4 of 9 trainable parameters have had no gradient up to step 5 and stay as they are (a, b, c and 1 more)"
    assert [fact.text for fact in finding.evidence] == [said, "their modules are not called"]


def test_a_training_of_which_nothing_was_said_has_none():
    assert findings(evidence()) == ()
