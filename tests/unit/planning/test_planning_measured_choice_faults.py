"""Faults during a trial of plans: they end no training that would run, and leave every training unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from op_tapes import OpTape
from plans_to_try import configuration, plan_of
from plimsoll.errors import InputError, PlimsollWarning, TornStepError
from plimsoll.planning.measured_choice import try_plan
from plimsoll.records.plan import Choice
from plimsoll.step.cuda_graphs import capture
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import cuda_graph
from steps_to_try import BATCH, Paced, paced

pytestmark = pytest.mark.usefixtures("all_candidates_run")

KEPT = Choice(technique="heap", options={"mapped_from": "never"})


class Fussy(Paced):
    """A model that accepts `num_samples` samples and raises `error` for other numbers."""

    def __init__(self, num_samples, error):
        super().__init__()
        self.num_samples, self.error = num_samples, error

    def forward(self, inputs):
        if len(inputs) > 2 and len(inputs) != self.num_samples and self.training:
            raise self.error
        return super().forward(inputs)


def fussy(fallbacks, num_samples, error):
    model = Fussy(num_samples, error)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(
        model, optimizer, lambda model, batch: model(batch), units="samples", fallbacks=fallbacks, recut_loss=True
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "why"),
    [(InputError("too few: give more"), "too few: give more"), (ValueError("too few"), "ValueError: too few")],
    ids=["ours", "another"],
)
def test_what_fails_by_itself_is_left_to_the_others(error, why):
    step = fussy((configuration(8),), 8, error)
    plan = try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)
    assert [one.outcome for one in plan.trial.tried] == ["fastest", "failed"]
    assert plan.trial.tried[1].why == why
    assert plan.fallbacks == (configuration(8),)
    assert step(BATCH).micro_batch == 8


def test_where_all_fail_without_a_shortage_the_plan_stays_and_the_training_says_why():
    fallbacks = configuration(8), configuration(4, mib=60)
    step = fussy(fallbacks, -1, ValueError("too few"))
    plan = try_plan(step, plan_of(*fallbacks[:1], configuration(3), fallbacks=fallbacks[1:]), BATCH)
    assert [(one.outcome, one.why) for one in plan.trial.tried] == [("failed", "ValueError: too few")] * 2
    assert plan.fallbacks == fallbacks
    with pytest.raises(ValueError, match="too few"):
        step(BATCH)


def test_a_loss_that_an_update_made_infinite_counts_against_no_candidate():
    """One batch is trained on again and again, which no training does."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    first, behind = configuration(8), (configuration(2, mib=60), configuration(1, mib=30))
    step = TrainStep(
        model, optimizer, lambda model, batch: model(batch).square().mean(), units="samples",
        fallbacks=(first, *behind), recut_loss=True,
    )  # fmt: skip
    before = [one.detach().clone() for one in model.parameters()]
    plan = try_plan(step, plan_of(first, configuration(4, mib=80), fallbacks=behind), 40 * torch.randn(64, 16))
    assert sorted(one.outcome for one in plan.trial.tried) == ["fastest", "slower"]
    assert all(map(torch.equal, before, model.parameters()))


class Stubborn:
    """User-defined state that cannot be restored."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("no way back")


def test_a_candidate_that_cannot_be_undone_does_not_count_as_failed():
    step = paced(fallbacks=(configuration(8),), extra_state=[Stubborn()])
    with pytest.raises(TornStepError, match=r"not restored \(ValueError: no way back\): reload the last checkpoint"):
        try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)


def test_what_the_undo_could_not_put_back_is_named(monkeypatch):
    """This covers the state that a trial has not copied."""
    step = paced(fallbacks=(configuration(8),))
    monkeypatch.setattr(step._retry.undo, "moved_iterators", lambda: ["model.rows"])
    monkeypatch.setattr(step._retry, "observed", step._retry.undo.observed)
    with pytest.raises(TornStepError, match=r"has changed the position of model\.rows for good: reload"):
        try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)


def test_an_interrupt_leaves_the_fallbacks_of_the_plan_in_force():
    fallbacks = configuration(8), configuration(4, mib=50), configuration(1, mib=30)
    step = fussy(fallbacks, 8, KeyboardInterrupt())
    before = [one.detach().clone() for one in step.workload.model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        try_plan(step, plan_of(configuration(8), configuration(3, mib=90), fallbacks=fallbacks[1:]), BATCH)
    assert [size.samples for size in step._fallbacks.sizes] == [8, 4, 1]
    assert all(map(torch.equal, before, step.workload.model.parameters()))
    assert step(BATCH).micro_batch == 8


def test_a_step_of_another_training_is_refused():
    in_bf16 = Choice(technique="autocast", options={"dtype": "bf16"})
    with pytest.raises(
        InputError,
        match=r"autocast=bf16 for the whole run, but .* nothing: create the step with fallbacks=plan\.fallbacks",
    ):
        try_plan(
            paced(fallbacks=(configuration(8),)), plan_of(configuration(8, in_bf16), configuration(4, in_bf16)), BATCH
        )


class Rare(nn.Module):
    """A model that writes a large table for some samples only."""

    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(64, 4), torch.ones(16384, 64)

    def forward(self, inputs):
        if inputs[0, 0] == 7:
            with torch.no_grad():
                self.table.mul_(0.5)
        return (self.head(inputs) * self.table[0, 0]).square().mean()


def test_the_first_step_is_observed_as_without_a_trial():
    """The step survives running out of memory after a sample that writes state which no sample of the trial writes."""
    torch.manual_seed(0)
    model, fallbacks = Rare(), (configuration(2), configuration(1, mib=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = TrainStep(
        model, optimizer, lambda model, batch: model(batch), units="samples", fallbacks=fallbacks, recut_loss=True
    )  # fmt: skip
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    try_plan(step, plan_of(configuration(2), configuration(2, KEPT), fallbacks=fallbacks[1:]), batch)
    rare = batch.clone()
    rare[6, 0] = 7
    with armed("backward", 4):
        result = step(rare)
    assert len(result.oom_events) == 1
    assert model.table[0, 0] == 0.5  # written once


def test_nothing_that_replays_have_learned_outlives_a_candidate(monkeypatch):
    """A tape of ops replaces the graph. Steps that are not replayed report a reason."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", OpTape)
    monkeypatch.setattr(cuda_graph, "_obstacle", lambda workload, setting: None)
    graph = Choice(technique="cuda_graph")
    step = paced(fallbacks=(configuration(8, graph),))
    step.replays.why_not = "of an earlier plan"
    plan = try_plan(step, plan_of(configuration(8, graph), configuration(4)), BATCH)
    assert [one.why for one in plan.trial.tried] == ["", ""]
    assert (step.replays.why_not, step.replays.num_replays) == (None, 0)
    monkeypatch.setattr(capture.Capture, "of", lambda *_: "it is forbidden")
    step = paced(fallbacks=(configuration(8, graph),))
    with pytest.warns(PlimsollWarning, match="it is forbidden"):
        plan = try_plan(step, plan_of(configuration(8, graph), configuration(4)), BATCH)
    why = "micro-batches were not replayed as a CUDA graph, because it is forbidden"
    assert [one.why for one in plan.trial.tried] == [why, ""]
    assert step.replays.why_not is None
