"""Code that changes its arguments or state is refused, with its line."""

import re
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.models.recurrent.segments import Passed
from plimsoll.techniques.mechanisms.purity import Attributes, run_purely


def adds_in_place(number, state, slices):
    state[0].add_(slices[0].sum())  # this line
    return Passed(state=state)


def writes_through_a_view(number, state, slices):
    slices[0][0] = 1.0  # this line
    return Passed(state=state)


def adds(number, state, slices):
    return Passed(state=(state[0] + slices[0].sum(),))


@pytest.mark.parametrize("run", [adds_in_place, writes_through_a_view])
def test_a_change_in_place_is_refused_with_its_line(run):
    line = run.__code__.co_firstlineno + 1
    with pytest.raises(
        InputError, match=rf"test_techniques_mechanisms_purity\.py, line {line}: .*# this line"
    ) as error:
        run_purely(run, 3, (torch.zeros(2),), (torch.ones(2),))
    assert "segment 3" in str(error.value)
    assert "write `state = state + ...`" in str(error.value)


def test_what_changes_nothing_runs():
    assert torch.equal(run_purely(adds, 0, (torch.zeros(2),), (torch.ones(2),)).state[0], torch.full((2,), 2.0))


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.history, self.steps = torch.zeros(2), deque(), 0
        self.memory = SimpleNamespace(hidden=torch.zeros(2))
        self.phase, self.last, self.is_late, self.table = "a", None, False, {}
        self.array, self.large, self.bytes = np.zeros(2), np.zeros((100, 100)), bytearray(2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input, how):
        if how == "attribute":
            self.hidden = self.hidden + input
        elif how == "list":
            self.history.append(input)
        elif how == "number":
            self.steps += 1
        elif how == "object":
            self.memory.hidden = input
        elif how == "buffer":
            self.count += 1
        elif how == "numpy":
            self.array += 1
        elif how == "large":
            self.large += 1
        elif how == "string":
            self.phase = "b"
        elif how == "none":
            self.last = "a step"
        elif how == "bool":
            self.is_late = True
        elif how == "key":
            self.table["step"] = object()
        elif how == "bytes":
            self.bytes[0] = 1
        return input


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("attribute", "hidden"),
        ("list", "history"),
        ("number", "steps"),
        ("object", "memory"),
        ("numpy", "array"),
        ("large", "large"),
        ("string", "phase"),
        ("none", "last"),
        ("bool", "is_late"),
        ("key", "table"),
        ("bytes", "bytes"),
    ],
)
def test_a_state_in_an_attribute_is_refused(how, name):
    cell = nn.Sequential(Keeps())
    before = Attributes(cell)
    cell[0](torch.ones(2), how)
    with pytest.raises(InputError, match=re.escape(f"Keeps keeps a state in its attribute `{name}`")) as error:
        before.require_unchanged()
    if how == "attribute":
        line = Keeps.forward.__code__.co_firstlineno + 2
        assert f"(test_techniques_mechanisms_purity.py, line {line})" in str(error.value)


def test_a_buffer_that_changes_is_refused_with_another_remedy():
    cell = Keeps()
    before = Attributes(cell)
    cell(torch.ones(2), "buffer")
    with pytest.raises(InputError, match=r"changes its buffer `count` .* put that module in evaluation mode"):
        before.require_unchanged()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_is_computed_anew_is_no_state():
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    before = Attributes(layer)
    layer(torch.ones(2))
    before.require_unchanged()


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        run_purely(adds, 0, (torch.zeros(2),), (torch.ones(2),))


def test_what_stays_is_no_state():
    cell = Keeps()
    before = Attributes(cell)
    cell(torch.ones(2), "nothing")
    before.require_unchanged()
