"""Changes between steps that no operator shows are noticed before the next replay, or nothing is captured.

A tape of operators stands in for the graph (`op_tapes`).
"""

import copy
import os

import numpy
import pytest
import torch
from torch import nn

from op_tapes import OpTape
from plimsoll.step.cuda_graphs import capture, surroundings
from plimsoll.techniques import cuda_graph
from replayed import GRAPH, Net, batches, loss_of, refused, require_the_same_bits, trained

VARIABLE = "PLIMSOLL_TEST_WEIGHT"


@pytest.fixture
def tapes(monkeypatch):
    """Enable graphs on the CPU, and return the captured tapes."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", OpTape)
    monkeypatch.setattr(cuda_graph, "_obstacle", lambda workload, setting: None)
    monkeypatch.setenv(VARIABLE, "1")
    OpTape.made.clear()
    return OpTape.made


class Loss:
    """A loss with weights in many places, which it reads without torch's dispatcher."""

    def __init__(self):
        self.array, self.tensor, self.config = numpy.ones(1), torch.ones(1), {"weight": 1.0}
        self.function = lambda: 1.0

    def __call__(self, model, batch):
        weight = float(self.array[0]) * self.tensor.tolist()[0] * self.config["weight"] * float(os.environ[VARIABLE])
        return loss_of(model, batch) * weight * self.function() * of_a_default()


def of_a_default(weights={"weight": 1.0}):
    return weights["weight"]


def array_in_place(loss, monkeypatch):
    loss.array *= 0.5


def tensor_in_place(loss, monkeypatch):
    loss.tensor.mul_(0.5)


def tensor_by_numpy(loss, monkeypatch):
    loss.tensor.numpy()[0] = 0.5


def variable(loss, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.5")


def method_of_torch(loss, monkeypatch):
    forward = nn.Tanh.forward
    monkeypatch.setattr(nn.Tanh, "forward", lambda module, x: forward(module, x) * 0.5)


def method_of_the_program(loss, monkeypatch):
    forward = Net.forward
    monkeypatch.setattr(Net, "forward", lambda module, x: forward(module, x) * 0.5)


def function_of_a_library(loss, monkeypatch):
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *given: linear(*given) * 0.5)


def code_of_a_function(loss, monkeypatch):
    monkeypatch.setattr(loss_of, "__code__", (lambda model, batch: model(batch["x"]).square().mean()).__code__)


def default_in_place(loss, monkeypatch):
    monkeypatch.setitem(of_a_default.__defaults__[0], "weight", 0.5)


def dict_that_came_later(loss, monkeypatch):
    loss.config["weight"] = 0.5


def array_that_came_later(loss, monkeypatch):
    loss.array[0] = 0.5


def variable_of_a_function_that_came_later(loss, monkeypatch):
    loss.weights[0] = 0.5


def come(loss):
    """Add new weights after the search for state, and before the capture."""
    weights = [1.0]
    loss.array, loss.config, loss.function = numpy.ones(1), {"weight": 1.0}, lambda: weights[0]
    loss.weights = weights


CHANGES = [
    array_in_place, tensor_in_place, tensor_by_numpy, variable, method_of_torch, method_of_the_program,
    function_of_a_library, code_of_a_function, default_in_place, dict_that_came_later, array_that_came_later,
    variable_of_a_function_that_came_later,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_loop_changes_is_captured_anew(tapes, change):
    def train(*more):
        loss = Loss()

        def between(step):
            if step.num_steps == 1 and change.__name__.endswith("later"):
                come(loss)
            if step.num_steps == 3:
                change(loss, patched)

        with pytest.MonkeyPatch.context() as patched:
            return trained(Net(), *more, loss=loss, data=batches(num_steps=5), between_steps=between)

    found, expected, unchanged = train(GRAPH), train(), trained(Net(), loss=Loss(), data=batches(num_steps=5))
    require_the_same_bits(found, expected)
    assert expected[0][:3] == unchanged[0][:3]
    assert expected[0] != unchanged[0]
    assert found[2].num_replays == 2 * 4
    assert len(tapes) == 2


def test_what_stays_is_captured_once(tapes):
    assert trained(Net(), GRAPH, loss=Loss())[2].num_replays > 0
    assert len(tapes) == 1


class CountingOnTheHost(Loss):
    """A loss that counts in a tensor, with writes that no operator shows."""

    def __call__(self, model, batch):
        self.tensor.numpy()[0] += 1
        return loss_of(model, batch)


def test_a_pass_that_changes_a_tensor_of_the_host_is_refused(tapes):
    assert refused(Net(), loss=CountingOnTheHost()) == "a pass changes loss.tensor, and a replay runs no Python"


@pytest.mark.parametrize("name", ["array", "tensor"])
def test_what_is_too_large_to_be_compared_is_refused(tapes, monkeypatch, name):
    monkeypatch.setattr(surroundings, "SMALL_BYTES", 64)
    loss = Loss()
    setattr(loss, name, numpy.ones(9) if name == "array" else torch.ones(17))
    why = refused(Net(), loss=loss)
    assert f"(most in loss.{name}), but no more than 64 B can be compared before each step" in why


def test_an_array_of_objects_is_refused(tapes):
    loss = Loss()
    loss.array = numpy.array([1.0], dtype=object)
    assert refused(Net(), loss=copy.copy(loss)) == "loss.array is an array of objects, which cannot be compared"
