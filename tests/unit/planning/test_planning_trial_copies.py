"""State that only a later pass of a trial writes: it is restored for the training, or nothing is tried."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from plans_to_try import configuration, plan_of
from plimsoll.planning import measured_choice
from plimsoll.planning.measured_choice import try_plan
from plimsoll.step.train_step import TrainStep

pytestmark = pytest.mark.usefixtures("all_candidates_run")

BATCH = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
LATE = 3  # the call that writes; the first one is a warm-up


class Writing(nn.Module):
    """A model that writes state in one late call with `num_samples`, as a target network is updated now and then."""

    def __init__(self, kind, num_samples):
        super().__init__()
        self.head, self.kind, self.num_samples, self.num_calls = nn.Linear(64, 64), kind, num_samples, 0
        table = torch.ones(4096 + 1, 64)  # more than the undo copies in every step
        if kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table, requires_grad=False) if kind == "frozen" else table
        self.in_a_list, self.in_a_dict = [table.clone()], {"deep": [table.clone()]}
        self.array = numpy.ones(200_000 if kind == "large array" else 2)
        if kind == "iterator":
            self.rows = iter(range(100))
        self.log, self.generator = [], torch.Generator().manual_seed(3)

    def forward(self, inputs):
        self.num_calls += 1
        if self.num_calls == LATE and len(inputs) == self.num_samples:
            self.write()
        total = self.table[0, 0] + self.in_a_list[0][0, 0] + self.in_a_dict["deep"][0][0, 0] + float(self.array[0])
        drawn = torch.rand((), generator=self.generator)
        return (self.head(inputs) * (total + len(self.log) + drawn)).square().mean()

    @torch.no_grad()
    def write(self):
        match self.kind:
            case "buffer" | "attribute" | "frozen":
                self.table.mul_(0.5)
            case "uncounted":
                self.table.data.mul_(0.5)
            case "moved":
                self.table.data = self.table * 0.5
            case "another":
                self.table = self.table * 0.5
            case "list":
                self.in_a_list[0].mul_(0.5)
            case "dict":
                self.in_a_dict["deep"][0].mul_(0.5)
            case "log":
                self.log.append(1.0)
            case "array" | "large array":
                self.array *= 0.5
            case "iterator":
                next(self.rows)

    def state(self):
        tensors = [self.table, self.in_a_list[0], self.in_a_dict["deep"][0], *self.parameters()]
        return [one.detach().clone() for one in tensors], [*self.log], self.array.copy(), self.num_calls


def step_of(kind, num_samples, fallbacks):
    torch.manual_seed(0)
    model = Writing(kind, num_samples)
    trained = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-3, momentum=0.9)
    return TrainStep(
        model, trained, lambda model, batch: model(batch), units="samples", fallbacks=fallbacks, recut_loss=True
    )


def require_same_state(found, expected):
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1] == expected[1]
    assert (found[2] == expected[2]).all()
    assert found[3] == expected[3]


@pytest.mark.parametrize("num_samples", [8, 4], ids=["the first candidate", "a later one"])
@pytest.mark.parametrize(
    "kind", ["buffer", "attribute", "frozen", "uncounted", "moved", "another", "list", "dict", "log", "array"]
)
def test_what_a_late_pass_writes_is_put_back(kind, num_samples):
    step = step_of(kind, num_samples, (configuration(8),))
    before = step.workload.model.state()
    plan = try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)
    assert all(one.measured_seconds for one in plan.trial.tried), plan.trial
    require_same_state(step.workload.model.state(), before)
    found = [step(BATCH).loss for _ in range(4)]
    plain = step_of(kind, num_samples, plan.fallbacks)
    assert found == [plain(BATCH).loss for _ in range(4)]
    require_same_state(step.workload.model.state(), plain.workload.model.state())


@pytest.mark.parametrize("num_samples", [8, 4], ids=["the first candidate", "a later one"])
@pytest.mark.parametrize("kind", ["iterator", "large array"])
def test_what_could_not_be_put_back_is_not_tried(kind, num_samples):
    """Not even if an earlier step has left it unchanged."""
    step = step_of(kind, num_samples, (configuration(8),))
    step(BATCH)
    before = step.workload.model.state()
    plan = try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)
    assert ("rows is an iterator" if kind == "iterator" else "array cannot be copied") in plan.trial.left_out
    assert (plan.fallbacks, plan.trial.tried) == ((configuration(8),), ())
    require_same_state(step.workload.model.state(), before)
    assert kind != "iterator" or next(step.workload.model.rows) == 0


def test_more_than_can_be_copied_in_a_moment_is_not_tried(monkeypatch):
    monkeypatch.setattr(measured_choice, "_MOST_COPIED_BYTES", {"cpu": 1 << 20})
    step = step_of("attribute", 8, (configuration(8),))
    plan = try_plan(step, plan_of(configuration(8), configuration(4)), BATCH)
    assert "MiB of tensors would take too long" in plan.trial.left_out
    assert step.workload.model.num_calls == 0
