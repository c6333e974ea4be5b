"""Random numbers and buffers go back to what they were."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.device.base import backend_for
from plimsoll.run.undo import Undo


class Counting(nn.Module):
    """A module with a buffer that it may change in place, one that it may reassign, and one it may set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("cache", torch.ones(2))
        self.register_buffer("seen", None)


def undo_of(module):
    return Undo(module, backend_for("cpu"))


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


class Clones(TorchDispatchMode):
    """Counts the tensors that are copied."""

    num_clones = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_clones += function is torch.ops.aten.clone.default
        return function(*args, **(kwargs or {}))


def test_a_buffer_of_integers_that_did_not_change_is_copied_once():
    module = nn.Sequential(Counting(), nn.BatchNorm1d(2).eval())
    undo = undo_of(module)
    with Clones() as clones:
        undo.remember()
    assert clones.num_clones == 5  # count, cache; running_mean, running_var, num_batches_tracked
    with Clones() as clones:
        undo.remember()
    assert clones.num_clones == 4  # the floats, whose version counters cannot be trusted
    module[1].num_batches_tracked.add_(1)
    with Clones() as clones:
        undo.remember()
    assert clones.num_clones == 5


def test_a_buffer_that_a_module_deleted_comes_back_and_may_stay_away():
    model = nn.Module()
    model.register_buffer("seen", torch.ones(2))
    undo = Undo(model, backend_for("cpu"))
    undo.remember()
    del model.seen
    undo.restore()
    assert model.seen.tolist() == [1, 1]
    del model.seen
    undo.remember()
    undo.restore()
    assert not hasattr(model, "seen") or model.seen is None
