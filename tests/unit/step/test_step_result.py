"""The result of a step, and the events that it records."""

import pytest
import torch

from plimsoll.records.run import OomEvent
from plimsoll.step.result import Outcome, StepResult, at_least_fp32, note

EVENT = OomEvent(step=1, phase="forward", family="cpu", micro_batch=2)


def test_a_result_takes_what_the_outcome_found():
    outcome = Outcome(loss=0.5, gradient_norm=None, learning_rate=1e-3, updated=True)
    result = StepResult(
        step=1,
        num_samples=4,
        num_units=4,
        micro_batch=2,
        fallback=0,
        step_seconds=0.1,
        oom_events=(),
        **outcome._asdict(),
    )
    assert (result.loss, result.gradient_norm, result.learning_rate, result.updated) == (0.5, None, 1e-3, True)


def test_an_event_is_noted_and_told():
    events: list[OomEvent] = []
    told: list[OomEvent] = []
    note(EVENT, events, None)
    note(EVENT, events, told.append)
    assert events == [EVENT, EVENT]
    assert told == [EVENT]


@pytest.mark.parametrize(
    ("dtype", "added_up_in"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64)],
)  # fmt: skip
def test_losses_of_micro_batches_are_added_up_in_single_precision_at_least_and_without_their_graphs(dtype, added_up_in):
    loss = torch.tensor(0.5, dtype=dtype, requires_grad=True) * 2
    kept = at_least_fp32(loss)
    assert (kept.dtype, kept.requires_grad, kept.item()) == (added_up_in, False, 1.0)


def test_a_result_stays_as_it_was():
    outcome = Outcome(loss=0.5, gradient_norm=None, learning_rate=1e-3, updated=True)
    result = StepResult(
        step=1,
        num_samples=4,
        num_units=4,
        micro_batch=2,
        fallback=0,
        step_seconds=0.1,
        oom_events=(),
        **outcome._asdict(),
    )
    with pytest.raises(AttributeError):
        result.loss = 0.0  # type: ignore[misc]
