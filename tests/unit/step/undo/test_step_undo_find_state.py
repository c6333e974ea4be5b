"""All places in which training code can store state are found, whoever holds them, and can be restored."""

import ctypes
import functools
import importlib
import random
import sys
import threading
import types
from collections import deque

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from plimsoll.step.undo.find_state import SMALL_BYTES, Attributes, Numbers, _is_of_program, reached_from

COUNT = [0]
NUMBER = 0


def count_globally():
    global NUMBER
    NUMBER += 1


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Averager:
    """A user's object, such as an exponential average."""

    def __init__(self):
        self.values, self.inner = {"mean": [0.0]}, Slotted()


class Net(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.linear, self.averager, self.seen = nn.Linear(2, 2), Averager(), deque([1])
        self.generator, self.numpy_generator, self.drawn = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.table = np.zeros(3)
        self.register_buffer("mean", torch.zeros(2))
        self.linear.weight.register_post_accumulate_grad_hook(functools.partial(noted, []))

    def forward(self, x):
        count_globally()
        Net.total += 1
        COUNT[0] += 1
        return self.linear(x)


def noted(seen, _):
    seen.append(1)


def put_back(reached, contents):
    for (_, place), content in zip(reached.places, contents, strict=True):
        place.fill(content)


def changes(net, queue):
    """Return the changes that a pass may make, by name, each with a function that shows its effect."""
    hook = next(iter(net.linear.weight._post_accumulate_grad_hooks.values()))
    return {
        "an attribute": (lambda: setattr(net, "calls", 1), lambda: hasattr(net, "calls")),
        "a buffer that comes": (lambda: net.register_buffer("late", torch.ones(1)), lambda: "late" in net._buffers),
        "a module that comes": (lambda: net.add_module("late", nn.Linear(1, 1)), lambda: len(list(net.children()))),
        "a deque": (lambda: net.seen.append(2), lambda: list(net.seen)),
        "a list in a dict in an object": (
            lambda: net.averager.values["mean"].append(1),
            lambda: str(net.averager.values),
        ),
        "a slot": (lambda: setattr(net.averager.inner, "calls", 5), lambda: net.averager.inner.calls),
        "a class attribute": (lambda: setattr(Net, "total", Net.total + 1), lambda: Net.total),
        "a global of a function that forward calls": (count_globally, lambda: NUMBER),
        "a list that is global": (lambda: COUNT.append(1), lambda: list(COUNT)),
        "what a loss closes over": (lambda: queue.add(3), lambda: set(queue)),
        "what a hook of a gradient is bound to": (lambda: hook(None), lambda: list(hook.args[0])),
    }


@pytest.mark.parametrize("name", changes(Net(), set()))
def test_what_a_pass_changes_is_put_back(name):
    net, queue = Net(), {1}

    def loss(model, batch):
        queue.add(len(batch))
        return model(batch).sum()

    reached = reached_from([("model", net), ("loss", loss)])
    contents = [place.content() for _, place in reached.places]
    change, shown = changes(net, queue)[name]
    before = shown()
    change()
    assert shown() != before
    put_back(reached, contents)
    assert shown() == before


def test_tensors_arrays_and_generators_are_found_with_their_names():
    net = Net()
    reached = reached_from([("model", net)])
    assert {name for name, _ in reached.tensors.values()} == {"model.linear.weight", "model.linear.bias", "model.mean"}
    assert [name for name, _ in reached.arrays] == ["model.table"]
    assert {name for name, _ in reached.generators} == {"model.generator", "model.numpy_generator", "model.drawn"}


def test_what_was_reached_before_is_not_looked_at_again():
    net, other = Net(), types.SimpleNamespace(value=[1])
    first = reached_from([("model", net)])
    second = reached_from([("model", net), ("other", other)], first)
    assert {name for name, _ in second.places} == {"other", "other.value"}


def test_a_container_with_very_many_items_is_not_looked_through():
    reached = reached_from([("table", [[]] * 10_001)])
    assert len(reached.places) == 1


def test_what_refers_to_itself_is_looked_at_once():
    one = types.SimpleNamespace()
    one.itself, one.items = one, [one]
    assert [name for name, _ in reached_from([("one", one)]).places] == ["one", "one.items"]


@pytest.mark.parametrize("value", [torch.utils.data.DataLoader([1]), types, torch.float32, "text", 3])
def test_data_and_what_cannot_change_is_left_alone(value):
    assert not reached_from([("value", value)]).places


def test_what_a_model_of_transformers_writes_in_its_config_is_reached():
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    owners = [place.owner for _, place in reached_from([("model", model)]).places if isinstance(place, Attributes)]
    assert any(owner is model.config for owner in owners)


def test_a_programs_own_module_may_have_the_name_of_a_library(tmp_path, monkeypatch):
    (tmp_path / "trl.py").write_text("class Bank:\n    def __init__(self):\n        self.rows = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    bank = importlib.import_module("trl").Bank()
    _is_of_program.cache_clear()
    assert "bank.rows" in {name for name, _ in reached_from([("bank", bank)]).places}
    _is_of_program.cache_clear()
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert not reached_from([("bank", bank)]).places
    _is_of_program.cache_clear()
    monkeypatch.delitem(sys.modules, "trl")


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_double), ("n", ctypes.c_int))


def test_memory_of_c_and_of_a_thread_is_put_back():
    point, number, view, own = Point(1.0, 2), ctypes.c_long(3), memoryview(bytearray(16)).cast("d"), threading.local()
    own.count = 4
    places = [place for _, place in reached_from([("all", [point, number, view, own])]).places]
    contents = [place.content() for place in places]
    point.x, point.n, number.value, view[1], own.count = 5.0, 6, 7, 8.0, 9
    for place, content in zip(places, contents, strict=True):
        place.fill(content)
    assert (point.x, point.n, number.value, view.tolist(), own.count) == (1.0, 2, 3, [0.0, 0.0], 4)


def test_memory_that_is_large_or_only_read_is_left_alone():
    large = (ctypes.c_byte * (SMALL_BYTES + 1))()
    values = [large, memoryview(large), memoryview(b"read")]
    assert not any(isinstance(place, Numbers) for _, place in reached_from([("all", values)]).places)
