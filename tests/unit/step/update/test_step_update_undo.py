"""The data that an update changes is copied before it, and data that is not copied is known not to change."""

import weakref

import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.errors import TornStepError
from plimsoll.step.failpoints import armed, exhaust_memory
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit
from plimsoll.step.update.scratch import Scratch
from plimsoll.step.update.undo import ChunkCopy, Learned, Memory, WholeCopy

LARGE = (1 << 18) + 1
"""Floats, so many that they are more than 1 MiB."""


def with_gradient(length=3):
    parameter = nn.Parameter(torch.ones(length))
    parameter.grad = torch.full_like(parameter, 2.0)
    return parameter


def memory():
    return Memory(None, Scratch(1 << 20), None)


def piece_of(optimizer, changes_gradients=None):
    members = [(0, parameter) for parameter in optimizer.param_groups[0]["params"]]
    return ChunkCopy(optimizer, members, memory(), changes_gradients)


def whole_of(optimizer, learned, is_again=False):
    return WholeCopy(optimizer, learned, memory(), backend_for("cpu"), is_again=is_again)


@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}, True),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}, False),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True, "weight_decay": 0.1}, False),
        (torch.optim.Rprop, {"foreach": True}, False),
        (torch.optim.AdamW, {"foreach": True}, False),
        (torch.optim.AdamW, {"fused": True}, False),  # its schema declares that it writes gradients
    ],
)
def test_it_is_seen_whether_an_update_changes_gradients(kind, settings, changes):
    parameter = with_gradient()
    optimizer = kind([parameter], lr=0.1, **settings)
    for update in range(2):  # the second update of Rprop differs if signs change
        parameter.grad = torch.full_like(parameter, 2.0 - 4 * update)
        copy = piece_of(optimizer)
        copy.run(optimizer.step)
    assert copy.changes_gradients == changes
    copy.restore()
    assert parameter.grad.tolist() == [-2] * 3


def test_gradients_that_are_known_to_change_are_copied_and_put_back():
    parameter = with_gradient()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    copy = piece_of(optimizer, changes_gradients=True)
    copy.run(optimizer.step)
    assert parameter.grad.tolist() != [2] * 3
    copy.restore()
    assert (parameter.grad.tolist(), parameter.tolist(), len(optimizer.state)) == ([2] * 3, [1] * 3, 0)


def test_updates_are_observed_less_and_less_often():
    optimizer = torch.optim.SGD([with_gradient()], lr=0.1)
    learned = Learned(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    observed = []
    for number in range(12):
        copy = whole_of(optimizer, learned)
        observed += [number] if copy._is_observed else []
        copy.run(optimizer.step, [])
    assert observed == [0, 1, 2, 3, 4, 5, 6, 7, 9, 11]
    assert whole_of(optimizer, learned, is_again=True)._is_observed


def hooked(parameter, average, is_due):
    """Return SGD with a hook that changes a large average in the updates for which ``is_due`` is true."""
    optimizer, count = torch.optim.SGD([parameter], lr=1.0), [0]

    def hook(*_):
        count[0] += 1
        if is_due(count[0]):
            average.lerp_(torch.ones_like(average), 0.5)

    optimizer.register_step_post_hook(hook)
    return optimizer


def commit_of(optimizer):
    return StepCommit(optimizer, backend_for("cpu"), Position(phase="optimizer"))


def test_what_a_hook_was_seen_to_write_is_copied_from_then_on():
    average, parameter = torch.zeros(LARGE), with_gradient()
    commit = commit_of(hooked(parameter, average, lambda count: count == 9 or count > 10))
    for number in range(11):  # seen by its version in the ninth, which is not observed; the eleventh fails
        parameter.grad = torch.ones(3)
        with armed("optimizer", *([1] if number == 10 else [])):
            commit.step()
    assert (average[0].item(), average[-1].item(), parameter[0].item()) == (0.75, 0.75, -10)


def test_what_a_hook_writes_for_the_first_time_in_an_update_that_fails_is_named():
    average, parameter = torch.zeros(LARGE), with_gradient()
    commit = commit_of(hooked(parameter, average, lambda count: count == 9))
    for _ in range(8):
        commit.step()
        parameter.grad = torch.ones(3)
    with armed("optimizer", 1), pytest.raises(TornStepError, match=r"average cannot be put back.*reload the last"):
        commit.step()


class HalvesGradients(torch.optim.SGD):
    """An optimizer that changes gradients in its third update, and fails."""

    num_updates = 0

    def step(self, closure=None):
        type(self).num_updates += 1
        if self.num_updates == 3:
            self.param_groups[0]["params"][0].grad.mul_(0.5)
            exhaust_memory()
        return super().step(closure)


def test_where_gradients_are_lost_the_update_is_not_tried_again():
    """The whole step is retried instead, which computes the gradients again."""
    parameter = with_gradient()
    commit = commit_of(HalvesGradients([parameter], lr=1.0))
    for _ in range(3):
        parameter.grad = torch.ones(3)
        commit.step()
    assert (commit.outcome is None, parameter.tolist(), HalvesGradients.num_updates) == (False, [-1] * 3, 2)


def test_an_error_that_is_not_about_memory_leaves_nothing_of_the_update():
    """The failing hook is called after the parameters have changed."""
    parameter = with_gradient()
    optimizer = torch.optim.Adam([parameter], lr=0.1)

    def broken(*_):
        raise KeyError("x")

    optimizer.register_step_post_hook(broken)
    with pytest.raises(KeyError):
        commit_of(optimizer).step()
    assert (parameter.tolist(), len(optimizer.state), parameter.grad.tolist()) == ([1] * 3, 0, [2] * 3)


def test_memory_that_runs_out_in_a_copy_or_in_putting_it_back_is_no_other_error(monkeypatch):
    parameter = with_gradient()
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    expected = torch.ones(3) - 0.1
    failures = {"__init__": 1, "restore": 1}

    def failing(name):
        original = getattr(WholeCopy, name)

        def method(*args, **kwargs):
            if failures[name]:
                failures[name] -= 1
                exhaust_memory()
            return original(*args, **kwargs)

        monkeypatch.setattr(WholeCopy, name, method)

    failing("__init__")
    failing("restore")
    commit = commit_of(optimizer)
    with armed("optimizer", 1):
        commit.step()
    assert (failures, commit.outcome) == ({"__init__": 0, "restore": 0}, None)
    torch.testing.assert_close(parameter.data, expected)


@pytest.mark.parametrize("params", [[], [with_gradient(2)]], ids=["no parameter", "no gradient"])
def test_an_optimizer_from_elsewhere_is_called_even_where_nothing_is_to_be_updated(params):
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            type(self).count += 1

    optimizer = Counting([{"params": params}, {"params": []}], lr=0.1)
    for parameter in params:
        parameter.grad = None
    commit_of(optimizer).step()
    assert Counting.count == 1


def test_a_copy_is_gone_with_its_update():
    """It must not wait for the garbage collector, as it is as large as parameters and states together."""
    optimizer = torch.optim.SGD([with_gradient()], lr=0.1)
    learned, copies = Learned(optimizer), []
    for _ in range(3):
        copy = whole_of(optimizer, learned)
        copies.append(weakref.ref(copy._values))
        copy.run(optimizer.step, [])
    del copy
    assert [one() for one in copies] == [None] * 3


class ExchangesItsState(torch.optim.SGD):
    """An optimizer that replaces a state tensor in each update."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = parameter.grad + self.state[parameter].get("mean", 0)


def test_states_that_an_update_exchanges_are_not_kept_alive():
    parameter, old = with_gradient(), []
    optimizer = ExchangesItsState([parameter])
    commit = commit_of(optimizer)
    for _ in range(4):
        parameter.grad = torch.ones(3)
        commit.step()
        old.append(weakref.ref(optimizer.state[parameter]["mean"]))
    assert [one() is None for one in old] == [True] * 3 + [False]
