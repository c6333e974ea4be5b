"""Random number generators and buffers are restored."""

import functools
import random
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.step.undo.step_state import Undo, left_alone


class Counting(nn.Module):
    """A module with three buffers: to change in place, to reassign, and to set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.ones(2))
        self.register_buffer("seen", None)


def undo_of(module):
    return Undo({"model": module}, backend_for("cpu"))


def test_a_buffer_changed_in_place_is_put_back():
    module = Counting()
    undo = undo_of(module)
    undo.remember()
    module.count += 5
    undo.restore()
    assert module.count.tolist() == [0, 0, 0]


def test_a_buffer_that_was_reassigned_is_the_old_tensor_again():
    module = Counting()
    cache = module.cache
    undo = undo_of(module)
    undo.remember()
    module.cache.mul_(2)
    module.cache = torch.zeros(7)
    undo.restore()
    assert module.cache is cache
    assert cache.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["seen", "cache"])
def test_a_buffer_that_was_set_or_cleared_is_as_before(name):
    module = Counting()
    undo = undo_of(module)
    undo.remember()
    module.seen, module.cache = torch.ones(1), None
    undo.restore()
    assert module.seen is None
    assert module.cache.tolist() == [1, 1]


def test_the_running_statistics_of_batch_norm_are_put_back():
    """Its kernel writes them without counting a new version, so they cannot be told from unchanged ones."""
    module = nn.BatchNorm1d(2)
    undo = undo_of(module)
    for start in (0.0, 1.0):  # also the second time
        undo.remember()
        before = {name: tensor.clone() for name, tensor in module.named_buffers()}
        module(torch.tensor([[start, 1.0], [2.0, 5.0]]))
        assert not torch.equal(module.running_mean, before["running_mean"])
        undo.restore()
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.named_buffers())
        module(torch.tensor([[start, 1.0], [2.0, 5.0]]))  # a step that happened


def test_the_state_to_go_back_to_is_the_last_one_remembered():
    module = Counting()
    undo = undo_of(module)
    undo.remember()
    module.count += 5
    undo.remember()
    module.count += 5
    undo.restore()
    assert module.count.tolist() == [5, 5, 5]
    undo.restore()
    assert module.count.tolist() == [5, 5, 5]


def test_the_same_random_numbers_are_drawn_again():
    def draws():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    undo = undo_of(nn.Linear(1, 1))
    undo.remember()
    first = draws()
    undo.restore()
    assert draws() == first
    undo.restore()
    assert draws() == first


class Teaching(nn.Module):
    """A model with all kinds of state, besides buffers, that a pass may write."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("scale", torch.full((1,), 0.5).expand(3))
        self.table, self.generator, self.calls = np.zeros(2), torch.Generator().manual_seed(1), 0
        self.is_late = False

    def forward(self, batch):
        self.calls += 1
        self.table += 1
        batch["x"][0] = 7
        with torch.no_grad():
            self.teacher.lerp_(self.trained, 0.5)
            if self.is_late:
                self.trained.clamp_(max=0.5)
        return (self.trained * batch["x"] * self.scale + torch.rand(3, generator=self.generator)).sum()


def state_of(model, batch, queue):
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return tensors, model.table.tolist(), model.calls, batch["x"].tolist(), queue.tolist(), model.generator.get_state()


def same(one, other):
    return one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])


@pytest.fixture
def training():
    """Return a model, a loss that writes a queue, the queue, and an undo of both."""
    model, queue = Teaching(), torch.zeros(2)

    def loss(model, batch):
        queue.add_(1)
        return model(batch)

    return model, loss, queue, Undo({"model": model, "loss": loss}, backend_for("cpu"))


def batch_of(number):
    return {"x": torch.arange(3.0) + number}


def test_what_the_first_passes_write_is_put_back_whoever_holds_it(training):
    model, loss, queue, undo = training
    batch = batch_of(1)
    before = state_of(model, batch, queue)
    undo.remember(batch)
    with undo.observing():
        loss(model, batch).backward()
    assert not same(state_of(model, batch, queue), before)
    undo.restore()
    assert same(state_of(model, batch, queue), before)
    assert not undo.lost


def test_what_was_seen_to_be_written_is_put_back_in_later_steps(training):
    model, loss, queue, undo = training
    undo.remember(batch := batch_of(1))
    with undo.observing():
        loss(model, batch).backward()
        undo.passed()
        undo.observed()
    undo.done()
    batch = batch_of(2)
    before = state_of(model, batch, queue)
    undo.remember(batch)
    loss(model, batch)
    undo.restore()
    assert same(state_of(model, batch, queue), before)
    assert not undo.lost


def test_a_tensor_that_is_reached_from_nowhere_is_put_back_as_long_as_it_lives():
    @functools.lru_cache(maxsize=1)
    def table(number):
        return torch.zeros(2)

    model, written = nn.Linear(1, 1), []

    def loss(number):
        written.append(weakref.ref(table(number).add_(1)))

    undo = undo_of(model)
    table(1)
    for expected in (1.0, 2.0):
        undo.remember()
        with undo.observing() if undo.is_due else nullcontext():
            loss(1)
            undo.restore()
            assert table(1).tolist() == [expected - 1] * 2
            loss(1)
            undo.passed()
        undo.observed()
        undo.done()
        assert table(1).tolist() == [expected] * 2
    table(2)
    undo.remember()
    assert written[0]() is None
    assert not undo._strangers


def test_a_first_write_in_a_later_step_is_named_and_then_known(training):
    model, loss, _, undo = training
    undo.remember(batch := batch_of(1))
    with undo.observing():
        loss(model, batch)
        undo.passed()
        undo.observed()
    undo.done()
    model.is_late = True
    undo.remember(batch)
    loss(model, batch)
    undo.restore()
    assert undo.lost == ("model.trained",)
    for _ in range(2):
        model.trained.data.fill_(1)
        undo.remember(batch)
        loss(model, batch)
        undo.passed()
        undo.observed()
        undo.restore()
    assert model.trained.tolist() == [1, 1, 1]


def test_a_first_write_is_named_too_where_its_passes_went_through_and_the_update_fails(training):
    model, loss, _, undo = training
    undo.remember(batch := batch_of(1))
    with undo.observing():
        loss(model, batch)
        undo.passed()
        undo.observed()
    undo.done()
    model.is_late = True
    undo.remember(batch)
    loss(model, batch)
    undo.passed()
    undo.observed()
    undo.restore()
    assert undo.lost == ("model.trained",)


def test_what_is_only_read_is_not_copied_once_a_step_was_seen():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), Counting())
    undo = undo_of(model)
    undo.remember()
    with undo.observing():
        model[0](torch.ones(1, 2)).sum().backward()
        undo.passed()
        undo.observed()
    undo.done()
    undo.remember()
    assert not undo._before[0].copies


def test_passes_can_be_undone_in_the_middle_and_observed_on(training):
    model, loss, queue, undo = training
    batch = batch_of(1)
    before = state_of(model, batch, queue)
    undo.remember(batch)
    with undo.observing():
        for _ in range(2):
            loss(model, batch)
            undo.restore()
            assert same(state_of(model, batch, queue), before)


@pytest.mark.parametrize("make", [lambda: {"sum": 0.0}, lambda: torch.zeros(2), lambda: nn.Linear(1, 1)])
def test_what_a_loop_adds_to_a_list_is_put_back_too(make):
    model = nn.Module()
    model.states = [1.5]

    def passes():
        state = model.states[-1]
        if isinstance(state, dict):
            state["sum"] += 1
        else:
            with torch.no_grad():
                (state if isinstance(state, torch.Tensor) else state.weight).add_(1)

    def value():
        state = model.states[-1]
        return state["sum"] if isinstance(state, dict) else getattr(state, "weight", state).flatten()[0].item()

    undo = undo_of(model)
    undo.remember()
    with undo.observing():
        undo.passed()
        undo.observed()
    undo.done()
    model.states.append(make())
    before = value()
    undo.remember()
    passes()
    undo.restore()
    assert value() == (before if not isinstance(model.states[-1], nn.Module) else before + 1)
    assert undo.lost == (("model.states.weight",) if isinstance(model.states[-1], nn.Module) else ())


def test_what_came_into_a_place_that_changes_is_put_back_too():
    """The hidden state is a new tensor after each pass, and is also written in place."""
    model = nn.Module()
    model.states = [torch.zeros(2)]

    def carry():
        model.states[0].add_(1)
        model.states = [model.states[0].clone()]

    undo = undo_of(model)
    for number in range(4):
        undo.remember()
        with undo.observing():
            carry()
            undo.passed()
            undo.observed()
        undo.done()
    before = model.states[0].tolist()
    undo.remember()
    carry()
    undo.restore()
    assert model.states[0].tolist() == before


class Counter:
    """User state that cannot be reached from the model."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_state_that_says_itself_is_put_back():
    counter = Counter()
    undo = Undo({"model": nn.Linear(1, 1)}, backend_for("cpu"), extra_state=[counter])
    undo.remember()
    counter.number += 1
    undo.restore()
    assert counter.number == 0


def test_a_buffer_that_a_module_deleted_comes_back_and_may_stay_away():
    model = nn.Module()
    model.register_buffer("seen", torch.ones(2))
    undo = undo_of(model)
    undo.remember()
    del model.seen
    undo.restore()
    assert model.seen.tolist() == [1, 1]
    del model.seen
    undo.remember()
    undo.restore()
    assert not hasattr(model, "seen") or model.seen is None


CALLS = [0]
NUM_CALLS = 0


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.calls, self.kept, self.cache = 0, [], {"a": 1}

    def forward(self, x):
        self.calls += 1
        self.kept.append(x)
        self.cache["b"], self.last = 2, x
        self.mean.add_(1)
        return x * torch.rand(2)


class Centred(nn.Module):
    """A loss with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))
        self.queue = torch.zeros(3)

    def forward(self, model, batch):
        self.centre += 1
        self.queue.add_(1)
        return model(batch).sum() - self.centre


class Holder:
    """An object with a loss and a reference to that bound method, as wrappers of calls have."""

    def __init__(self):
        self.calls = 0
        self.wrapped = functools.partial(self.loss)

    def loss(self, model, batch):
        self.calls += 1
        return model(batch).sum()


def test_a_loss_may_hold_what_it_is_bound_to():
    model, holder = Keeping(), Holder()
    with left_alone({"model": model, "loss": functools.partial(holder.wrapped)}, backend_for("cpu")):
        holder.loss(model, torch.ones(2))
    assert (holder.calls, model.calls) == (0, 0)


def test_nothing_stays_of_a_pass():
    model, centred, seen, number = Keeping(), Centred(), [], 0

    def loss(model, batch, scale):
        nonlocal number
        global NUM_CALLS
        number, NUM_CALLS = number + 1, NUM_CALLS + 1
        seen.append(batch)
        CALLS[0] += 1
        return centred(model, batch) * scale

    state, before = torch.get_rng_state(), dict(vars(model))
    with left_alone({"model": model, "loss": functools.partial(loss, scale=2)}, backend_for("cpu")):
        for _ in range(2):
            loss(model, torch.ones(2), 2)
        assert (model.calls, number, NUM_CALLS, CALLS, len(seen)) == (2, 2, 2, [2], 2)
    assert (model.calls, model.kept, model.cache, number, NUM_CALLS, CALLS, seen) == (0, [], {"a": 1}, 0, 0, [0], [])
    assert vars(model).keys() == before.keys()
    assert float(model.mean.sum() + centred.centre + centred.queue.sum()) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_is_a_module_or_a_method_is_left_alone_too():
    model, centred = Keeping(), Centred()
    for loss in (centred, centred.forward):
        with left_alone({"model": model, "loss": loss}, backend_for("cpu")):
            loss(model, torch.ones(2))
        assert float(centred.centre + centred.queue.sum()) == 0


def test_what_only_numpy_writes_is_put_back_by_the_oldest_copy():
    """This also holds after a restore in the block, which is a write, too: the copy before it has new values."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    with left_alone({"model": model}, backend_for("cpu")) as before:
        model.mean.numpy()[:] += 1
        before.restore()
        model.mean.numpy()[:] += 1
    assert torch.equal(model.mean, torch.zeros(2))


def test_what_is_frozen_or_unfrozen_is_put_back():
    model = nn.Linear(1, 1)
    with left_alone({"model": model}, backend_for("cpu")):
        model.weight.requires_grad_(False)
    assert model.weight.requires_grad
