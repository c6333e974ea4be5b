"""Candidates of a plan, run before a training: what is measured of them, and that the training is as without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import small_job, train_here
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.errors import InputError
from plimsoll.plan.cost import learned_ratio
from plimsoll.records.device import Budget
from plimsoll.records.plan import Candidate, Choice, Duration, Plan, Rung, Trial, micro_batch_choice
from plimsoll.records.prediction import Estimate
from plimsoll.records.run import RunRecord
from plimsoll.run import trial
from plimsoll.run.learning import known_calibration
from plimsoll.run.step import TrainStep
from plimsoll.run.trial import try_plan
from processes import run_program
from workloads import BATCH_SIZE, CASES, Case, weights_of

MIB = 1 << 20
GPT2, _, LSTM, CNN = CASES
FUSED = Choice(technique="optimizer_kernel", options={"kernel": "fused"})
ON_DISK = Choice(technique="optimizer_offload", options={"to": "disk"})
PARAMETERS = Choice(technique="parameter_offload", options={"gradients": True})
RECOMPUTED = Choice(technique="checkpointing", options={"blocks": "all"})
KEPT = Choice(technique="heap", options={"mapped_from": "never"})
EARLY = Choice(technique="optimizer_in_backward")


def rung(samples: int, *others: Choice, mib: int = 100, seconds: float = 1.0) -> Rung:
    """One way to run a step; ``mib`` and ``seconds`` are what is predicted."""
    peak = Estimate(likely_bytes=mib * MIB, low_bytes=mib * MIB, high_bytes=mib * MIB)
    step_time = Duration(likely_seconds=seconds, low_seconds=seconds / 2, high_seconds=2 * seconds)
    return Rung(choices=(micro_batch_choice(samples), *others), peak=peak, step_time=step_time)


def plan_of(first: Rung, *candidates: Rung, fallbacks: tuple[Rung, ...] = ()) -> Plan:
    return Plan(
        budget=Budget(), rungs=(first, *fallbacks), candidates=tuple(Candidate(rung=one) for one in candidates),
        made_for={"target": "cpu"},
    )  # fmt: skip


def step_of(case: Case, rungs: tuple[Rung, ...], make=None, **options: object) -> TrainStep:
    model, optimizer = case.fresh()
    if make is not None:
        optimizer = make(model.parameters())
    return TrainStep(model, optimizer, units=case.units, rungs=rungs, **({"clip_norm": 1.0} | options))


def trained(
    step: TrainStep, case: Case, num_steps: int = 4
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    losses = [step(batch).loss for batch in case.batches()[:num_steps]]
    return losses, weights_of(step.workload.model, step.workload.optimizer), torch.rand(4).tolist()


class Remembering(torch.optim.Optimizer):
    """One of the user's own, which keeps what it likes where it likes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.means, self.num_steps = {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    mean = self.means.setdefault(one, torch.zeros_like(one))
                    mean.lerp_(one.grad, 1 / self.num_steps)
                    one.sub_(group["lr"] * mean)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


CUT = (rung(4), rung(8, FUSED), rung(2, RECOMPUTED), rung(4, ON_DISK), rung(8, PARAMETERS), rung(3, KEPT))


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    ("case", "make", "tried"),
    [
        (GPT2, None, CUT),
        (LSTM, None, (rung(8), rung(4, ON_DISK), rung(3, KEPT))),
        (CNN, None, (rung(8), rung(8, FUSED), rung(8, KEPT))),  # BatchNorm keeps its batches whole
        (GPT2, nesterov, (rung(8), rung(4))),
        (LSTM, torch.optim.Adagrad, (rung(8), rung(2, ON_DISK))),
        (LSTM, Remembering, (rung(8), rung(4))),
    ],
    ids=["gpt2", "lstm", "cnn", "nesterov", "adagrad", "own"],
)
def test_a_training_has_the_same_bits_as_without_a_trial(case, make, tried, num_before):
    """Before the first step, and in the middle, where states exist."""
    first, *others = (one for one in tried if make is None or FUSED not in one.choices)
    step = step_of(case, (first,), make)
    for batch in case.batches()[:num_before]:
        step(batch)
    plan = try_plan(step, plan_of(first, *others), case.batches()[0])
    assert [one.outcome for one in plan.trial.tried].count("fastest") == 1
    assert all(one.measured_seconds > 0 for one in plan.trial.tried), plan.trial
    found = trained(step, case)
    step.close()
    other = step_of(case, (first,), make)
    for batch in case.batches()[:num_before]:
        other(batch)
    other._rungs.exchange(plan.rungs)
    other.ladder = None
    losses, weights, draws = trained(other, case)
    assert (found[0], found[2]) == (losses, draws)
    assert found[1].keys() == weights.keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items())
    other.close()


def test_updates_in_backward_and_what_a_model_keeps_in_python_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.calls = CASES[2].build(), []

        def forward(self, **batch):
            self.calls.append(len(self.calls))
            return self.lstm(**batch)

    case = Case("counting", Counting, LSTM.data, LSTM.units)
    first, others = rung(8, EARLY), [rung(4), rung(8)]
    step = step_of(case, (first,), clip_norm=None)
    plan = try_plan(step, plan_of(first, *others), case.batches()[0])
    assert [one.measured_seconds is not None for one in plan.trial.tried] == [True] * 3
    assert step.workload.model.calls == []
    assert (step.num_steps, step.workload.optimizer.state) == (0, {})
    losses = trained(step, case)[0]
    assert trained(step_of(case, plan.rungs, clip_norm=None), case)[0] == losses


def test_a_schedule_is_where_it_was():
    model, optimizer = LSTM.fresh()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    step = TrainStep(model, optimizer, units="next-tokens", rungs=(rung(8),), schedule=schedule)
    before = schedule.state_dict()
    try_plan(step, plan_of(rung(8), rung(4)), LSTM.batches()[0])
    assert schedule.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 1e-2


class Paced(nn.Module):
    """Which takes a moment for each pass of less than so many samples."""

    def __init__(self, least=BATCH_SIZE):
        super().__init__()
        self.head, self.least = nn.Linear(4, 1), least
        self.ballast = torch.ones(500, 500)

    def forward(self, inputs):
        if len(inputs) < self.least:
            self.ballast @ self.ballast
        return self.head(inputs).mean()


def paced(**options):
    torch.manual_seed(0)
    model = Paced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rungs = options.pop("rungs")
    return TrainStep(model, optimizer, lambda model, batch: model(batch), units="samples", rungs=rungs, **options)


BATCH = torch.ones(BATCH_SIZE, 4)


def test_the_fastest_that_was_measured_is_in_force_and_what_needs_less_is_behind_it():
    slow, fast = rung(1, mib=90, seconds=1.0), rung(8, mib=100, seconds=1.2)
    behind = (rung(4, mib=60, seconds=1.5), rung(1, KEPT, mib=30, seconds=3.0))
    step = paced(rungs=(slow, *behind))
    plan = try_plan(step, plan_of(slow, fast, fallbacks=behind), BATCH)
    assert plan.rungs == (fast, slow, *behind)
    assert [one.outcome for one in plan.trial.tried] == ["slower", "fastest"]
    assert [one.predicted_seconds for one in plan.trial.tried] == [1.0, 1.2]
    assert plan.candidates == ()
    assert (step.rung, step(BATCH).micro_batch) == (0, 8)
    assert not step._rungs.has_one_in_force or step._rungs.names == [
        f"{size.samples} {step._rungs.described(size.level)}" for size in step._rungs.sizes
    ]


def test_what_fails_by_itself_is_left_to_the_others():
    class Fussy(Paced):
        def forward(self, inputs):
            if len(inputs) < BATCH_SIZE and self.training:
                raise InputError(f"a pass of {len(inputs)} samples is not taken: give more")
            return super().forward(inputs)

    model = Fussy()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch), units="samples",
        rungs=(rung(8),), recut_loss=True,
    )  # fmt: skip
    plan = try_plan(step, plan_of(rung(8), rung(4)), BATCH)
    assert [one.outcome for one in plan.trial.tried] == ["fastest", "failed"]
    assert plan.trial.tried[1].why == "a pass of 4 samples is not taken: give more"
    assert plan.rungs == (rung(8),)


@pytest.mark.parametrize(
    ("changes", "num_steps", "reason"),
    [
        ({"candidates": ()}, 10**6, "no other plan is about as fast"),
        ({}, 100, "in 100 steps of about 1 s it would hardly gain what it takes, up to 9.0 s"),
    ],
)
def test_what_would_not_be_worth_it_is_left_out(changes, num_steps, reason):
    step = paced(rungs=(rung(8),))
    plan = plan_of(rung(8), rung(4)).model_copy(update=changes)
    tried = try_plan(step, plan, BATCH, num_steps=num_steps)
    assert tried.trial == Trial(left_out=reason)
    assert tried.rungs == plan.rungs
    assert step.workload.model.training


def test_a_model_whose_state_cannot_be_put_back_is_not_tried():
    """No pass is made: one would move an iterator for good."""
    rows = iter(range(1000))

    class Reading(Paced):
        def forward(self, inputs):
            self.last = next(rows)
            return super().forward(inputs)

    model = Reading()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch), units="samples",
        rungs=(rung(8),), never_cut=True,
    )  # fmt: skip
    plan = try_plan(step, plan_of(rung(8), rung(8, KEPT)), BATCH)
    assert "is an iterator, whose position cannot be put back" in plan.trial.left_out
    assert next(rows) == 0
    assert plan.rungs == (rung(8),)


def test_nothing_is_begun_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(trial, "_MOST_SECONDS", {"cpu": 1e-9})
    monkeypatch.setattr(trial, "_MOST_STEPS", 0)
    said = []
    plan = try_plan(paced(rungs=(rung(8),)), plan_of(rung(8), rung(4), rung(2)), BATCH, progress=said.append)
    assert [one.outcome for one in plan.trial.tried] == ["not tried"] * 3 or plan.trial.left_out


def test_what_was_measured_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CACHE", str(tmp_path))
