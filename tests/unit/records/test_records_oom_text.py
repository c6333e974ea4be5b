"""The record of one out-of-memory text."""

from plimsoll.records.diagnosis import Diagnosis, Remedy, Share
from plimsoll.records.oom_text import OomText


def test_a_diagnosis_carries_the_event_in_the_words_of_the_labels():
    event = OomText(kind="cuda_driver", is_oom=True, likely_cause="unknown")
    diagnosis = Diagnosis(
        subject="log",
        event=event,
        shares=(Share(category="gradients", num_bytes=4, known="counted"),),
        remedies=(Remedy(text="a smaller batch", known="bound", saving_bytes=2),),
    )
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis
    assert event.tried_to_allocate is None
