"""The diagnosis of evidence."""

from peak_evidence import LOGITS, SCORES, evidence, tried
from plimsoll.diagnose.findings import diagnosed


def test_the_largest_effect_comes_first_and_causes_without_one_last():
    remedies = (tried("chunked_loss", 150),)
    diagnosis = diagnosed(evidence(holdings=(LOGITS, SCORES), remedies=remedies), ("a note",))
    assert [finding.cause for finding in diagnosis.findings] == ["attention_scores", "logits", "true_capacity"]
    assert (diagnosis.remedies, diagnosis.notes) == (remedies, ("a note",))
    assert (diagnosis.shares, diagnosis.limit_bytes) == (evidence().shares, 800 << 20)


def test_what_is_clean_has_no_answer():
    diagnosis = diagnosed(evidence(has_run_out=False))
    assert not diagnosis.has_answer
    assert diagnosis.findings == ()


def test_what_one_process_of_several_did_is_said():
    notes = diagnosed(evidence(first_step=20, last_step=40, last_step_of_run=50)).notes
    assert "the 50 steps of this run" in notes[0]
    assert "Steps 21 to 40 were analyzed" in notes[0]
    assert not any("were analyzed" in note for note in diagnosed(evidence(last_step=50, last_step_of_run=50)).notes)
