"""A slice of the storm of failing allocations (`benchmarks/storm.py`), and a check that it detects faults."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import storm  # noqa: E402
from _storm_run import (  # noqa: E402
    CHANGED,
    DIFFERENT,
    EQUAL,
    NAMED,
    NEVER,
    RAW,
    UNCHANGED,
    Cut,
    Failing,
    Kind,
    Plan,
    Run,
    plain,
    tried,
)
from _storm_state import differences, state_of  # noqa: E402
from plimsoll.errors import OutOfMemoryError, TornStepError  # noqa: E402
from plimsoll.step.retry import Retry  # noqa: E402
from plimsoll.step.train_step import TrainStep  # noqa: E402
from plimsoll.step.undo.step_state import Undo  # noqa: E402
from plimsoll.step.update.commit import StepCommit  # noqa: E402

KINDS = storm.all_kinds()
TEACHER = KINDS["state in forward: teacher in place"]
IMPORTS = ("GPT-2", "BERT", "windows", "libraries")  # the imports of transformers or accelerate take seconds
SLICE = [name for name in list(KINDS)[::24] if not any(part in name for part in IMPORTS)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SLICE)
@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_the_storm(name: str):
    found = storm.found_of(name, most=2)
    assert found.num_failures
    assert not found.faults, "\n".join(map(str, found.faults))


def test_there_are_as_many_kinds_as_were_promised():
    assert len(KINDS) >= 102


# -- it sees what is wrong ---------------------------------------------------------------------------------------------


def test_a_step_that_forgets_to_undo_is_seen(monkeypatch):
    monkeypatch.setattr(Undo, "restore", lambda undo: None)
    monkeypatch.setattr(Retry, "_compare", lambda retry, one_pass: None)  # it would detect the fault earlier
    trial = tried(TEACHER, Plan(step=1, allocation=8), {})
    assert trial.outcome == DIFFERENT
    assert "model.k.weight" in trial.said


def test_an_error_that_leaves_something_changed_is_seen(monkeypatch):
    def changing(step, batch):
        try:
            step.workload.loss(step.workload.model, batch)
        except RuntimeError:
            raise OutOfMemoryError("the step was undone") from None

    monkeypatch.setattr(TrainStep, "__call__", changing)
    trial = tried(TEACHER, Plan(step=1, allocation=5, how="from there on"), {})
    assert trial.outcome == CHANGED
    assert "model.k.weight" in trial.said


def test_an_error_of_the_allocator_is_seen(monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", lambda step, batch: step.workload.loss(step.workload.model, batch))
    trial = tried(TEACHER, Plan(step=1, allocation=3), {})
    assert trial.outcome == RAW
    assert "can't allocate memory" in trial.said


def test_a_torn_step_is_a_change(monkeypatch):
    def torn(step, batch):
        try:
            torch.empty(1)
        except RuntimeError:
            raise TornStepError("torn") from None

    monkeypatch.setattr(TrainStep, "__call__", torn)
    assert tried(TEACHER, Plan(step=1, allocation=1), {}).outcome == CHANGED


def test_allocations_are_seen_in_every_phase_and_in_the_undo():
    run, phases = Run(TEACHER), []
    run.do(1, lambda number: bool(phases.append(run.updates.phase)))
    assert {"forward", "backward", "optimizer"} <= set(phases)
    run.do(2, lambda number: number == 12)
    assert len(run.failed) == 1
    assert run.num_allocations[1] > run.num_allocations[0] / 2


def test_updates_in_which_allocations_are_counted_go_in_pieces(monkeypatch):
    calls = []
    in_pieces = StepCommit._do_in_chunks
    monkeypatch.setattr(StepCommit, "_do_in_chunks", lambda commit: calls.append(in_pieces(commit)))
    run = Run(TEACHER)
    for number in (1, 2, 3):
        run.do(number)
    assert len(calls) == 3


def test_after_an_update_what_the_error_names_is_called_and_the_training_goes_on():
    kind = KINDS["schedules: rates from a tensor"]
    last = storm.num_allocations(kind)[1]  # the last allocation of a step belongs to its schedule
    trial = tried(kind, Plan(step=1, allocation=last, how="from there on"), {})
    assert trial.outcome == NAMED
    assert "AfterUpdateError" in trial.said


def test_what_the_loop_does_between_batches_is_done_once_and_is_not_undone():
    numbers = []

    def made():
        training = TEACHER.make()
        training.between = numbers.append
        return training

    kind = Kind("loops", "noted", made)
    assert tried(kind, Plan(step=2, allocation=4, how="from there on"), {}).outcome == UNCHANGED
    steps_and_reference = [0, 1, 2]
    assert numbers == steps_and_reference * 2


def test_a_window_is_one_update_of_the_mean_of_its_batches():
    training, alike = TEACHER.made().in_windows(2), TEACHER.made()
    plain(training, [Cut((4, 4))])
    for batch in training.batches[:2]:
        (alike.loss(alike.model, batch) / 2).backward()
    alike.optimizer.step()
    assert torch.equal(training.model.b.weight, alike.model.b.weight)
    assert not torch.equal(training.model.b.weight, TEACHER.made().model.b.weight)


def test_training_that_may_be_cut_is_also_tried_cut_and_without_a_failure():
    assert tried(TEACHER, Plan(storm.NUM_UPDATES, how=NEVER), {}).outcome == EQUAL
    run = Run(KINDS["models: mean of vectors"], is_cut=True)
    run.do(1)
    assert run.cuts == [Cut((2,))]


def test_the_failing_operator_has_the_error_of_the_allocator():
    with Failing(lambda number: number == 2):
        kept = torch.ones(1).add_(1)
        with pytest.raises(RuntimeError, match=r"(?i)can't allocate memory"):
            kept.clone()


def test_nothing_is_allocated_by_views_and_writes():
    tensor = torch.ones(4)
    with Failing(lambda _: False) as counting:
        tensor.view(2, 2).add_(1).t()
        torch.empty(0)
    assert counting.num_allocations == 0
    with counting:
        torch._foreach_add([tensor], 1)
    assert counting.num_allocations == 1


# -- what is compared --------------------------------------------------------------------------------------------------


def test_states_are_compared_bit_for_bit_at_any_depth():
    model = nn.Linear(2, 2)
    kept = {"model": model, "held": [{"a": deque([torch.zeros(2)])}], "generator": torch.Generator()}
    before = state_of(kept)
    assert not differences(before, state_of(kept))
    kept["held"][0]["a"][0][1] = -0.0
    torch.rand(1, generator=kept["generator"])
    model.calls = 1
    assert set(differences(before, state_of(kept))) == {"model.calls", "held.0.a.0", "generator"}


def test_states_of_an_optimizer_are_compared_by_the_place_of_the_parameter():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    before = state_of({"optimizer": optimizer})
    second.grad = torch.ones(2)
    optimizer.step()
    changed = differences(before, state_of({"optimizer": optimizer}))
    assert "optimizer.state.1.momentum_buffer" in changed
    assert not [name for name in changed if ".0" in name]
