"""What a step says of itself, and of what it met on its way."""

from plimsoll.records.run import OomEvent
from plimsoll.run.outcome import Outcome, StepResult, note

EVENT = OomEvent(step=1, phase="forward", family="cpu", micro_batch=2)


def test_a_result_takes_what_the_outcome_found():
    outcome = Outcome(loss=0.5, gradient_norm=None, learning_rate=1e-3, updated=True)
    result = StepResult(
        step=1, num_samples=4, num_units=4, micro_batch=2, rung=0, step_seconds=0.1, oom_events=(), **outcome._asdict()
    )
    assert (result.loss, result.gradient_norm, result.learning_rate, result.updated) == (0.5, None, 1e-3, True)


def test_an_event_is_noted_and_told():
    events: list[OomEvent] = []
    told: list[OomEvent] = []
    note(EVENT, events, None)
    note(EVENT, events, told.append)
    assert events == [EVENT, EVENT]
    assert told == [EVENT]
