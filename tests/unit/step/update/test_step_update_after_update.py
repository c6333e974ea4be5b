"""The parts that follow an update are done once, as a whole, even if memory runs out. The update is never repeated."""

import re
import weakref

import numpy
import pytest
import torch
from torch import nn

from plimsoll import TrainStep
from plimsoll.device.base import backend_for
from plimsoll.errors import AfterUpdateError, OutOfMemoryError
from plimsoll.models.hooks import StepHooks
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.oom_boundary import Position
from plimsoll.step.undo.user_state import Kept
from plimsoll.step.update.after_update import AfterUpdate

NUM_STEPS = 4


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that counts in an attribute, a list and a tensor, and then may run out of memory."""

    def __init__(self, optimizer, failures=(), work=exhaust_memory):
        self.count, self.rates, self.total, self.work, self.failures = 0, [], torch.zeros(()), work, []
        super().__init__(optimizer)
        self.failures = list(failures)

    def get_lr(self):
        self.count += 1
        self.rates.append(0.1 / (self.count + len(self.rates)))
        self.total += self.rates[-1]
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * float(self.total)
        if self.failures and self.failures.pop():
            self.work()
        return [self.rates[-1] for _ in self.base_lrs]


def trained(failures=(), precision="fp32", **arguments):
    """Yield each step and its batch; ``failures`` are the failures of the schedule after the first step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = Warmup(optimizer, failures, **arguments)
    step = TrainStep(model, optimizer, loss, units="samples", schedule=schedule, precision=precision)
    for seed in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        yield step, {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(3, (8,), generator=generator)}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def state_of(step):
    schedule, optimizer = step.workload.schedule, step.workload.optimizer
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return (
        [parameter.tolist() for parameter in step.workload.model.parameters()],
        (schedule.count, schedule.rates, schedule.total.item(), schedule.last_epoch, schedule.get_last_lr()),
        (step.num_steps, settings),
    )


def run(*args, **kwargs):
    for step, batch in trained(*args, **kwargs):
        step(batch)
    return state_of(step)


@pytest.mark.parametrize("failures", [[True], [True, True]], ids=["once", "twice"])
def test_a_schedule_in_which_memory_runs_out_has_stepped_once_all_the_same(failures):
    assert run(failures) == run()


def test_an_error_says_that_the_update_is_done_and_nothing_else_is_half_done():
    """The next step continues as if the schedule had not been called."""
    done = []
    for number, (step, batch) in enumerate(trained()):
        schedule = step.workload.schedule
        if number == 1:
            before = (schedule.count, list(schedule.rates), schedule.total.item(), schedule.get_last_lr())
            schedule.step = exhaust_memory
            step.workload.hooks = StepHooks(after_step=(lambda: done.append(True),))
            weights = [parameter.tolist() for parameter in step.workload.model.parameters()]
            with pytest.raises(
                AfterUpdateError, match=r"schedule\.step\(\) after the update of step 2 .*do not repeat"
            ):
                step(batch)
            assert (schedule.count, schedule.rates, schedule.total.item(), schedule.get_last_lr()) == before
            assert [parameter.tolist() for parameter in step.workload.model.parameters()] != weights
            assert done == [True]  # cleanup functions run even so
            del schedule.step
        else:
            step(batch)
    assert step.num_steps == NUM_STEPS
    assert issubclass(AfterUpdateError, OutOfMemoryError)


def test_another_error_of_a_schedule_counts_the_step_whose_update_is_done():
    def broken():
        raise KeyError("x")

    step, batch = next(trained([True], work=broken))
    with pytest.raises(KeyError):
        step(batch)
    assert step.num_steps == 1
    assert step.workload.schedule.last_epoch == 0  # nothing of its step is left
    assert step.workload.schedule.count == 1


def test_what_fails_and_moves_is_state_and_begins_as_it_was():
    """A counter that failures change is not restored before the last try. It changes there, so it is state."""
    count, failures, seen = [0], [True, True], []

    def tidy_up():
        count[0] += 1
        if failures and failures.pop():
            exhaust_memory()
        seen.append(count[0])

    parameter = nn.Parameter(torch.zeros(1))
    AfterUpdate(torch.optim.SGD([parameter]), backend_for("cpu"), Position(1)).do(tidy_ups=(tidy_up,))
    assert (count, failures, seen) == ([1], [], [1])


def test_the_scale_of_a_scaler_is_changed_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    update, failures = scaler.update, [True]

    def failing():
        update()
        if failures and failures.pop():
            exhaust_memory()

    scaler.update = failing
    AfterUpdate(optimizer, backend_for("cpu"), Position(1)).do(scaler)
    assert (scaler.get_scale(), failures) == (16.0, [])


def test_the_message_has_what_a_user_needs():
    parameter = nn.Parameter(torch.zeros(1))
    following = AfterUpdate(torch.optim.SGD([parameter]), backend_for("cpu"), Position(7))
    with pytest.raises(AfterUpdateError) as raised:
        following.do(tidy_ups=(exhaust_memory,))
    said = str(raised.value)
    assert re.search(r"exhaust_memory\(\) after the update of step 7 .*asked for 1024\.0 PiB", said)
    assert "2 times" in said


class Trainer:
    """The object whose method is the function of a schedule. Most of its state is never changed by the schedule."""

    def __init__(self):
        self.arrays = [numpy.zeros(1 << 16) for _ in range(4)]  # of half a MiB
        self.records = [{"number": number} for number in range(1500)]
        self.failures, self.changes = [], []

    def rate(self, epoch):
        for change in self.changes:
            change()
        if epoch and self.failures and self.failures.pop():
            exhaust_memory()
        return 1 / (1 + epoch)


class MyLambda(torch.optim.lr_scheduler.LambdaLR):
    """A user's schedule."""


class Steps:
    """Updates and the parts that follow them, with a schedule whose function is bound to a trainer."""

    def __init__(self):
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        self.trainer = Trainer()
        self.schedule = MyLambda(self.optimizer, self.trainer.rate)
        self.following = AfterUpdate(self.optimizer, backend_for("cpu"), Position())

    def __call__(self, num_steps):
        for _ in range(num_steps):
            self.optimizer.step()
            self.following.do(schedule=self.schedule)


def test_what_a_schedule_keeps_is_looked_for_when_something_new_has_come(monkeypatch):
    looked = []
    look = Kept._look_for_all
    monkeypatch.setattr(Kept, "_look_for_all", lambda *given: looked.append(1) or look(*given))
    steps = Steps()
    steps(6)
    assert len(looked) == 2  # the second search finds the list that torch replaces: its rates
    steps.trainer.records[-1]["new"] = []
    steps(1)
    assert len(looked) == 3


def test_what_nobody_was_seen_to_change_is_not_copied(monkeypatch):
    """Arrays beyond one MiB and records after the first places are not copied, and only sometimes compared."""
    steps, copied = Steps(), []
    taken = Kept.arrays
    monkeypatch.setattr(Kept, "arrays", lambda kept: copied.append(tally(kept, [*taken(kept)])) or taken(kept))
    steps(9)
    assert [one == (4, True) for one in copied] == [True] * 8 + [False]
    assert copied[-1] == (2, False)


def tally(kept, arrays):
    """Return the number of copied arrays, and whether all places are copied."""
    return sum(copy is not None for _, _, copy in arrays), not kept.others


@pytest.mark.parametrize("what", ["records", "arrays"])
def test_what_is_changed_for_the_first_time_where_nobody_looks_is_named(what):
    steps = Steps()
    values = getattr(steps.trainer, what)
    steps.trainer.value = 0

    def change():
        values[-1][slice(1) if what == "arrays" else "number"] = steps.trainer.value

    steps.trainer.changes.append(change)
    values[-1] = values[0].copy()
    steps(8)
    steps.trainer.failures.append(True)
    steps.trainer.value = 7
    with pytest.raises(AfterUpdateError, match=rf"{what}\[\d+\] cannot be put back.*reload the last checkpoint"):
        steps(1)


@pytest.mark.parametrize("what", ["records", "arrays"])
def test_what_was_seen_to_be_changed_is_put_back_from_then_on(what):
    steps = Steps()
    last = getattr(steps.trainer, what)[-1]
    key = 0 if what == "arrays" else "number"

    def change():
        last[key] += 1

    steps.trainer.changes.append(change)
    steps(8)
    steps.trainer.failures.append(True)
    before = last[key]
    steps(1)
    assert (last[key], steps.trainer.failures) == (before + 1, [])


def test_what_the_loop_exchanges_in_each_step_is_not_kept_alive():
    steps, batches = Steps(), []
    for _ in range(6):
        steps.trainer.batch = torch.ones(3)
        batches.append(weakref.ref(steps.trainer.batch))
        steps(1)
    del steps.trainer.batch
    assert [batch() for batch in batches] == [None] * 6
