import functools

import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.run.left_alone import left_alone

CALLS = [0]
NUM_CALLS = 0


class Model(nn.Module):
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
    """A loss with a state of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))
        self.queue = torch.zeros(3)

    def forward(self, model, batch):
        self.centre += 1
        self.queue.add_(1)
        return model(batch).sum() - self.centre


class Holder:
    """Has a loss, and a call that is bound to itself, as what wraps calls of others has."""

    def __init__(self):
        self.calls = 0
        self.wrapped = functools.partial(self.loss)

    def loss(self, model, batch):
        self.calls += 1
        return model(batch).sum()


def test_a_loss_may_hold_what_it_is_bound_to():
    model, holder = Model(), Holder()
    with left_alone(model, functools.partial(holder.wrapped), backend_for("cpu")):
        holder.loss(model, torch.ones(2))
    assert (holder.calls, model.calls) == (0, 0)


def test_nothing_stays_of_a_pass():
    model, centred, seen, number = Model(), Centred(), [], 0

    def loss(model, batch, scale):
        nonlocal number
        global NUM_CALLS
        number, NUM_CALLS = number + 1, NUM_CALLS + 1
        seen.append(batch)
        CALLS[0] += 1
        return centred(model, batch) * scale

    state, before = torch.get_rng_state(), dict(vars(model))
    with left_alone(model, functools.partial(loss, scale=2), backend_for("cpu")):
        for _ in range(2):
            loss(model, torch.ones(2), 2)
        assert (model.calls, number, NUM_CALLS, CALLS, len(seen)) == (2, 2, 2, [2], 2)
    assert (model.calls, model.kept, model.cache, number, NUM_CALLS, CALLS, seen) == (0, [], {"a": 1}, 0, 0, [0], [])
    assert vars(model).keys() == before.keys()
    assert float(model.mean.sum() + centred.centre + centred.queue.sum()) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_is_a_module_or_a_method_is_left_alone_too():
    model, centred = Model(), Centred()
    for loss in (centred, centred.forward):
        with left_alone(model, loss, backend_for("cpu")):
            loss(model, torch.ones(2))
        assert float(centred.centre + centred.queue.sum()) == 0
