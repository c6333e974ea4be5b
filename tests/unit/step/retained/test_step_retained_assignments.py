"""The line that stores a value, and its replacement, for models of all kinds. Their source is this file."""

import linecache
from collections import deque

import pytest
from torch import nn

from plimsoll.step.retained.assignments import assignment_of, is_read

LOSSES = []


class Keeper(nn.Module):
    """A module that stores values in all kinds of places."""

    def __init__(self):
        super().__init__()
        self.only_here = make()
        self.assigned = None
        self.history = []

    def reset(self):
        self.assigned = None
        self.history = []
        self.more = deque()
        self.by_name = {}
        self.table: dict = {}
        self.harmless = value.detach()

    def forward(self, value, text):
        hidden = value
        self.assigned = value
        self.computed = 0.9 * self.computed + value
        self.states = (value, value)
        self.parts = [value]
        output, self.second = value
        output, (self.third, _) = value
        self.total += value * 2
        self.history.append(value)
        self.more.extend(value)
        self.by_name["a"] = value
        self.table.setdefault("a", value + 1)
        self.annotated: object = value
        self.half = value.float()
        self.number = float(value)
        self.harmless = value.detach()
        self.tracker.kept.append(value)
        return f"{output}{hidden}{self.used}"

    @staticmethod
    def remember(owner, value):
        owner.by_static = value


class Heir(Keeper):
    """A class that inherits its methods."""


class Tracker:
    """An object that a module holds."""


def make():
    return value


def value(): ...


def loss_of(model, batch):
    value = model(batch)
    LOSSES.append(value)
    loss_of.last = value
    return value


@pytest.mark.parametrize(
    ("name", "kept", "code", "remedy"),
    [
        ("assigned", None, "self.assigned = value", "self.assigned = value.detach()"),
        (
            "computed",
            None,
            "self.computed = 0.9 * self.computed + value",
            "self.computed = (0.9 * self.computed + value).detach()",
        ),
        (
            "states",
            (),
            "self.states = (value, value)",
            "self.states = tuple(state.detach() for state in (value, value))",
        ),
        ("parts", [], "self.parts = [value]", "self.parts = [state.detach() for state in [value]]"),
        (
            "second",
            None,
            "output, self.second = value",
            "output, self.second = value; self.second = self.second.detach()",
        ),
        (
            "third",
            None,
            "output, (self.third, _) = value",
            "output, (self.third, _) = value; self.third = self.third.detach()",
        ),
        ("total", None, "self.total += value * 2", "self.total += (value * 2).detach()"),
        ("history", [], "self.history.append(value)", "self.history.append(value.detach())"),
        ("more", [], "self.more.extend(value)", "self.more.extend([one.detach() for one in value])"),
        ("by_name", {}, "self.by_name['a'] = value", "self.by_name['a'] = value.detach()"),
        ("table", {}, "self.table.setdefault('a', value + 1)", "self.table.setdefault('a', (value + 1).detach())"),
        ("annotated", None, "self.annotated: object = value", "self.annotated = value.detach()"),
        ("half", None, "self.half = value.float()", "self.half = value.float().detach()"),
        ("by_static", None, "owner.by_static = value", "owner.by_static = value.detach()"),
        ("only_here", None, "self.only_here = make()", "self.only_here = make().detach()"),
    ],
)
@pytest.mark.parametrize("kind", [Keeper, Heir])
def test_the_line_and_what_to_write_for_it(kind, name, kept, code, remedy):
    store = assignment_of([kind.__new__(kind)], name, kept)
    assert (store.code, store.remedy) == (code, remedy)
    path, _, line = store.place.rpartition(":")
    shown = linecache.getline(path, int(line)).strip().replace('"', "'")
    assert shown == code


@pytest.mark.parametrize("name", ["harmless", "number", "hidden", "never"])
def test_what_keeps_no_graph_is_not_the_line(name):
    """`hidden` is a local variable of a method, not an attribute."""
    assert assignment_of([Keeper()], name) is None


def test_what_an_object_keeps_may_be_put_there_by_who_has_it():
    store = assignment_of([Tracker(), Keeper()], "kept")
    assert store.code == "self.tracker.kept.append(value)"


def test_variables_of_a_function_are_names():
    assert assignment_of([loss_of], "LOSSES").remedy == "LOSSES.append(value.detach())"
    assert assignment_of([loss_of], "last").remedy == "loss_of.last = value.detach()"


def test_without_a_source_there_is_no_line():
    names = {}
    exec("class Nowhere:\n    def forward(self, value):\n        self.kept = value", names)
    assert assignment_of([names["Nowhere"]()], "kept") is None
    assert not is_read([names["Nowhere"]()], "kept")
    assert assignment_of([nn.LSTM(1, 1)], "kept") is None


def test_a_lambda_is_half_a_line():
    assert assignment_of([lambda model, batch: LOSSES.append(batch)], "LOSSES") is None


@pytest.mark.parametrize(
    ("name", "is_used"), [("computed", True), ("used", True), ("history", False), ("assigned", False), ("never", False)]
)
def test_a_state_is_read_and_a_history_is_not(name, is_used):
    assert is_read([Keeper()], name) == is_used
