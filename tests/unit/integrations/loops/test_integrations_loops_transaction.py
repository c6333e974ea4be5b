"""Steps of another loop: undone as a whole, repeated in micro-batches, and the loop stays unchanged."""

from contextlib import contextmanager

import numpy
import pytest
import torch
from torch import nn

from plimsoll.errors import DataError, InputError, OutOfMemoryError
from plimsoll.integrations.loops.transaction import Transaction
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.recovery import FallbackSchedule
from plimsoll.step.retry import scaler_as_now
from plimsoll.techniques import TECHNIQUES
from plimsoll.techniques.cache import Cache

CHECKPOINTS = Choice(technique="checkpointing", options={"blocks": "all"})


class Loop:
    """A user's loop that clips, updates through `optimizer.step()`, and counts its work."""

    def __init__(self, num_steps_per_update=1, make=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)  # replaces the optimizer's step method
        self.transaction = Transaction(self.model, self.optimizer, **{"units": "samples", **options})
        self.num_steps_per_update = num_steps_per_update
        self.micro_batches = []

    def loss_of(self, micro_batch, share):
        return (self.model(micro_batch["x"]) - micro_batch["y"]).square().mean()

    def one_pass(self, micro_batch, share):
        self.micro_batches.append(len(micro_batch["x"]))
        loss = self.loss_of(micro_batch, share)
        (loss * share / self.num_steps_per_update).backward()
        return loss.detach()

    def finish(self, gradients):
        gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def train(self, num_batches=6):
        torch.manual_seed(1)
        for number in range(1, num_batches + 1):
            batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
            finish = None if number % self.num_steps_per_update else self.finish
            self.transaction.run(batch, self.one_pass, finish, self.loss_of)
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class LateLoop(Loop):
    """A loop that updates in another place than its last batch."""

    def train(self, num_batches=6):
        torch.manual_seed(1)
        self.num_again = 0
        for number in range(1, num_batches + 1):
            batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
            self.transaction.run(batch, self.one_pass, None, self.loss_of)
            if not number % self.num_steps_per_update:
                self.transaction.finish(self.finish)
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def finish(self, gradients):
        super().finish(gradients)
        self.num_again += self.transaction.is_again


@pytest.mark.parametrize("num_steps_per_update", [1, 2])
@pytest.mark.parametrize(("point", "hits"), [("forward", (3,)), ("optimizer", (1, 2, 3, 4, 5))])
def test_an_update_that_comes_later_is_undone_with_its_window_as_well(num_steps_per_update, point, hits):
    undisturbed, disturbed = Loop(num_steps_per_update).train(), LateLoop(num_steps_per_update)
    with armed(point, *hits):
        weights = disturbed.train()
    assert torch.equal(weights, undisturbed)
    assert disturbed.num_again == (point == "optimizer")


@pytest.mark.parametrize("num_steps_per_update", [1, 2, 3])
@pytest.mark.parametrize(
    ("point", "hits"),
    [("forward", (3,)), ("backward", (4,)), ("clip", (2,)), ("optimizer", (1, 2)), ("optimizer", (1, 2, 3, 4, 5))],
)
def test_what_ran_out_is_undone_with_its_window_and_done_again_with_the_same_bits(num_steps_per_update, point, hits):
    """Each size that has fitted gets a second try, so that the micro-batches and all dropout masks are the same."""
    undisturbed = Loop(num_steps_per_update).train()
    disturbed = Loop(num_steps_per_update)
    with armed(point, *hits):
        weights = disturbed.train()
    assert torch.equal(weights, undisturbed)
    assert disturbed.transaction.num_ooms > 0


def test_micro_batches_add_up_to_the_batch():
    whole, cut = Loop(), Loop(micro_batch=3)
    for loop in (whole, cut):
        loop.model[1].p = 0.0
    assert torch.allclose(cut.train(), whole.train(), atol=1e-6)
    assert cut.micro_batches == [3, 1] * 6


def test_a_first_batch_that_does_not_fit_is_cut():
    loop = Loop()
    with armed("backward", 1):
        loop.train(num_batches=1)
    (event,) = loop.transaction.events
    assert (event.phase, event.action, loop.transaction.micro_batch) == ("forward", "micro-batch 4 -> 2", 2)


def test_where_nothing_fits_the_step_is_undone_and_the_optimizer_is_left_as_it_was():
    loop = Loop()
    before = [parameter.clone() for parameter in loop.model.parameters()]
    own_step = loop.optimizer.step
    with armed("forward", *range(1, 30)), pytest.raises(OutOfMemoryError, match="smallest possible"):
        loop.train(num_batches=1)
    assert all(torch.equal(one, other) for one, other in zip(before, loop.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert loop.optimizer.step == own_step
    assert not loop.optimizer.state


def test_an_error_of_the_users_own_undoes_the_step_and_goes_on():
    loop = Loop()
    loop.train(num_batches=1)

    def breaks(gradients):
        gradients()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop.transaction.run({"x": torch.zeros(4, 3), "y": torch.zeros(4, 1)}, loop.one_pass, breaks, loop.loss_of)
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_what_the_loop_changes_is_put_back_before_each_new_try():
    def num_put_back(*hits):
        told = []
        loop = Loop(remember=lambda: lambda: told.append("put back"))
        with armed("clip", *hits):
            loop.train(num_batches=2)
        return len(told)

    assert num_put_back(1, 2) == num_put_back() + 2  # more than the check of passes restores


def test_the_fallbacks_of_a_plan_are_taken_in_order():
    torch.manual_seed(0)
    loop = Loop(fallbacks=[[micro_batch_choice(4)], [micro_batch_choice(2)]])
    with armed("forward", 1):
        loop.train(num_batches=1)
    assert loop.transaction.events[0].action == "micro-batch 4 -> 2"
    loop.transaction.close()


def test_metrics_are_numbers_for_a_log():
    loop = Loop()
    with armed("forward", 1):
        loop.train(num_batches=1)
    metrics = loop.transaction.metrics()
    assert metrics["plimsoll/micro_batch"] == 2
    assert metrics["plimsoll/oom"] == 1
    assert metrics["plimsoll/peak_bytes"] >= metrics["plimsoll/used_bytes"] > 2**20


def test_a_window_given_up_leaves_no_gradient():
    loop = Loop(num_steps_per_update=2)
    loop.train(num_batches=1)
    assert any(parameter.grad is not None for parameter in loop.model.parameters())
    loop.transaction.forget()
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_after_a_window_given_up_the_next_one_is_undone_to_its_own_beginning():
    loops = [KeptLoop("buffer"), KeptLoop("buffer")]
    for loop in loops:
        loop.train(num_updates=1)
        loop.one_batch(1)
        loop.transaction.forget()
    with armed("forward", 2):
        failed = loops[1].train(num_updates=1)
    assert torch.equal(failed, loops[0].train(num_updates=1))


def test_a_scaler_made_anew_has_the_scale_and_knows_no_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    fresh = scaler_as_now(scaler)
    assert fresh.get_scale() == 64.0
    fresh.scale(torch.ones(()))
    fresh.unscale_(optimizer)  # the old scaler refuses to do it twice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallbacks": [[micro_batch_choice(4), Choice(technique="adafactor")]]}, r"adafactor.*--forbid adafactor"),
        ({"fallbacks": [[micro_batch_choice(4)]], "micro_batch": 2}, "leave one of the two out"),
        ({"micro_batch": 0}, "at least 1"),
        ({"units": "words"}, "choose samples, tokens"),
        ({"make": torch.optim.LBFGS}, "use another optimizer"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Loop(**options)


def test_any_batch_is_taken_where_the_loop_would_take_it():
    loop = Loop(units="tokens", takes_any=True)
    nothing_to_learn = {"x": torch.randn(4, 3), "y": torch.randn(4, 1), "labels": torch.full((4, 2), -100)}
    with armed("forward", 1):
        loop.transaction.run(nothing_to_learn, loop.one_pass, loop.finish, loop.loss_of)
    assert loop.micro_batches == [2, 2]
    uneven = {"x": torch.randn(4, 3), "y": torch.randn(4, 1), "labels": torch.zeros(1)}
    loop.transaction.run(uneven, loop.one_pass, loop.finish, loop.loss_of)
    assert loop.micro_batches[-1] == 4


def test_techniques_around_the_loss_need_a_loss_that_is_the_callers():
    fallbacks = [[micro_batch_choice(4), Choice(technique="activation_offload", options={"to": "disk"})]]
    with pytest.raises(InputError, match="activation_offload"):
        Loop(fallbacks=fallbacks)
    Loop(fallbacks=fallbacks, loss=lambda model, batch: model(batch["x"]).mean())


def test_a_batch_without_a_target_is_refused():
    loop = Loop(units="tokens")
    with pytest.raises(DataError, match="remove such batches"):
        loop.transaction.run(
            {"x": torch.ones(2, 3), "labels": torch.full((2, 3), -100)}, loop.one_pass, loop.finish, loop.loss_of
        )


class ShortOfRoom(Cache):
    """A technique whose installation runs out of memory the first few times."""

    def __init__(self, num_failures):
        self.num_failures = num_failures

    def conflicts(self, choice, others, workload, setting):
        return None

    @contextmanager
    def install(self, workload, choice):
        if self.num_failures:
            self.num_failures -= 1
            exhaust_memory()
        yield


@pytest.mark.parametrize("num_failures", [0, 1, 2])
@pytest.mark.parametrize("num_steps_per_update", [1, 2])
def test_no_batch_is_cut_unasked_though_the_techniques_ran_out_of_memory(
    num_failures, num_steps_per_update, monkeypatch
):
    monkeypatch.setitem(TECHNIQUES, "cache", ShortOfRoom(num_failures))
    loop = Loop(num_steps_per_update, fallbacks=[[Choice(technique="cache"), micro_batch_choice(1)]])
    loop.loss_of = lambda micro_batch, share: (loop.model(micro_batch["x"]) - micro_batch["y"]).square().max()
    before = [one.detach().clone() for one in loop.model.parameters()]
    with pytest.raises(InputError, match="the loss of a batch is not the sum of the losses of its parts"):
        loop.train()
    assert loop.micro_batches == []
    assert all(map(torch.equal, before, loop.model.parameters()))


class Kept(nn.Module):
    """A model that reads values which its loop sets between two batches; `kind` is the place of the values."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 1)
        self.scale, self.log, self.settings = 1.0, [1.0], {"scale": 1.0}
        self.register_buffer("steps", torch.ones(()))
        self.large = torch.ones(300_000)
        self.array = numpy.ones(2)
        self.generator = torch.Generator().manual_seed(5)
        self.memory = torch.ones(2)

    def forward(self, x):
        self.log.append(self.log[-1] * 0.9)  # passes append values, too
        self.steps.mul_(0.9)
        self.memory.mul_(1.1)
        self.array *= 0.9
        self.scale *= 0.9
        factors = {
            "attribute": self.scale, "item": self.settings["scale"], "list": self.log[-1], "buffer": self.steps,
            "large": self.large[0].clone(), "array": float(self.array[0]), "new": self.memory[0].clone(),
            "generator": torch.rand((), generator=self.generator), "frozen": 1.0, "parameter": 1.0,
        }  # fmt: skip
        return self.linear(x) * factors.get(self.kind, 1.0)

    def between(self, number):
        """Set the values of the loop before batch `number`."""
        value = 1.0 + number / 8
        if self.kind in {"attribute", "random"}:
            self.scale = value + (torch.rand(()).item() if self.kind == "random" else 0)
        elif self.kind == "item":
            self.settings = {"scale": value}
        elif self.kind == "list":
            self.log.append(value)
        elif self.kind == "buffer":
            self.steps.fill_(value)
        elif self.kind == "large":
            self.large.mul_(value)
        elif self.kind == "array":
            self.array[:] = value
        elif self.kind == "new":
            self.memory = torch.full((2,), value)  # passes write it in place
        elif self.kind == "generator":
            self.generator.manual_seed(number)
        elif self.kind == "frozen":
            self.linear.bias.requires_grad_(number % 2 == 0)
        elif self.kind == "parameter":
            with torch.no_grad():
                self.linear.weight.clamp_(-value / 4, value / 4)


class KeptLoop(Loop):
    """A loop that sets values before each batch, and before an update of its own."""

    def __init__(self, kind, **options):
        super().__init__(3, **options)
        self.model = Kept(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.transaction = Transaction(self.model, self.optimizer, **{"units": "samples", **options})

    def one_batch(self, number, finish=None):
        self.model.between(number)
        batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
        self.transaction.run(batch, self.one_pass, finish, self.loss_of)

    def train(self, is_late=False, num_updates=3):
        torch.manual_seed(1)
        for number in range(1, num_updates * 3 + 1):
            is_last = number % 3 == 0
            self.one_batch(number, self.finish if is_last and not is_late else None)
            if is_last and is_late:
                self.model.between(number + 1)
                self.transaction.finish(self.finish)
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


KINDS = ["attribute", "random", "item", "list", "buffer", "large", "array", "new", "generator", "frozen", "parameter"]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loop_sets_between_two_batches_is_set_again(kind, is_late):
    """Each failure is in the third update; values that a loop writes are known from the first update on."""
    undisturbed = KeptLoop(kind).train(is_late)
    for point, hit in [("forward", 7), ("forward", 8), ("backward", 9), ("optimizer", 3)]:
        disturbed = KeptLoop(kind)
        hits = (hit, hit + 1) if point == "optimizer" else (hit,)
        with armed(point, *hits):
            assert torch.equal(disturbed.train(is_late), undisturbed), (point, hit)
        assert disturbed.transaction.num_ooms > 0


NAMED = {"large": "model.large", "parameter": "model.linear.weight"}
"""What is written for the first time, and not copied before as it is large or a parameter."""


@pytest.mark.parametrize("hit", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_first_window_the_same_is_so_or_it_is_named_and_undone(kind, hit):
    undisturbed, disturbed = KeptLoop(kind).train(num_updates=1), KeptLoop(kind)
    before = [one.detach().clone() for one in disturbed.model.parameters()]
    with armed("forward", hit):
        if kind not in NAMED:
            assert torch.equal(disturbed.train(num_updates=1), undisturbed)
            return
        with pytest.raises(OutOfMemoryError, match=NAMED[kind]):
            disturbed.train(num_updates=1)
    if kind == "large":
        assert all(map(torch.equal, before, disturbed.model.parameters()))


@pytest.mark.parametrize("hits", [(), (6,), (9,)])
@pytest.mark.parametrize("kind", ["attribute", "buffer", "list", "new", "random"])
def test_techniques_do_not_change_in_the_middle_of_a_window(kind, hits, monkeypatch):
    """Longer texts may need other techniques: here the second batch of the second window does."""
    undisturbed = KeptLoop(kind).train()
    monkeypatch.setitem(TECHNIQUES, "cache", ShortOfRoom(0))
    fallbacks = [[micro_batch_choice(4)], [Choice(technique="cache"), micro_batch_choice(4)]]
    disturbed = KeptLoop(kind, fallbacks=fallbacks)
    chosen = iter([0, 0, 0, 0, 1, 1, 1, 1, 1])
    monkeypatch.setattr(FallbackSchedule, "choose", lambda fallback_schedule, elements: next(chosen))
    with armed("forward", *hits):
        assert torch.equal(disturbed.train(), undisturbed)
    assert len(disturbed.micro_batches) == 9 + sum(
        {6: 2, 9: 2}[hit] for hit in hits
    )  # passes before the error, which are repeated
