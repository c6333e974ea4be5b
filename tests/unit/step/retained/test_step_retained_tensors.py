"""Tensors with a graph: the places in which they are found, and the places that are not searched."""

from collections import deque
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

from plimsoll.models.workload import model_loss
from plimsoll.step.retained.tensors import retained_by

GLOBAL_LOSSES = []


class Tracker:
    """A plain object of a user."""

    def __init__(self):
        self.losses = []

    def __call__(self, model, batch):
        return model(batch)

    def loss(self, model, batch):
        return model(batch)


def with_graph():
    return torch.ones(1, requires_grad=True) * 2


def model():
    return nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))


def names(model, loss=model_loss):
    return [retained.name for retained in retained_by(model, loss)]


def test_a_model_that_keeps_nothing_has_none():
    assert names(nn.LSTM(2, 2)) == []


@pytest.mark.parametrize(
    "keep",
    [
        lambda: with_graph(),
        lambda: [with_graph()],
        lambda: (None, with_graph()),
        lambda: {"a": with_graph()},
        lambda: deque([with_graph()], maxlen=2),
        lambda: [[(1, {"a": [with_graph()]})]],
        lambda: [torch.ones(1)] * 100 + [with_graph()],
    ],
    ids=["tensor", "list", "tuple", "dict", "deque", "nested", "late"],
)
def test_attributes_of_modules_are_found_by_the_path_of_the_module(keep):
    made = model()
    made[1][0].state = keep()
    (retained,) = retained_by(made, model_loss)
    assert (retained.name, retained.variable, retained.owners) == ("model.1.0.state", "state", (made[1][0],))
    assert len(retained.tensors) == 1


def test_buffers_are_found():
    made = model()
    made.register_buffer("mean", torch.zeros(1))
    made.mean = with_graph()
    assert names(made) == ["model.mean"]


def test_objects_that_a_module_has_are_looked_into():
    made = model()
    made.tracker = Tracker()
    made.tracker.losses.append(with_graph())
    made.tracker.again = made.tracker  # a circle
    (retained,) = retained_by(made, model_loss)
    assert (retained.name, retained.owners) == ("model.tracker.losses", (made.tracker, made))


def test_what_has_no_graph_or_is_a_parameter_is_not_retained():
    made = model()
    made.kept = [
        with_graph().detach(),
        torch.ones(1),
        nn.Parameter(torch.ones(1)),
        "text",
        1.0,
        None,
        torch.nn,
        Tracker,
    ]
    assert names(made) == []


def test_all_tensors_of_a_list_are_counted_the_newest_last():
    made = model()
    made.history = [with_graph() for _ in range(200)]
    (retained,) = retained_by(made, model_loss)
    assert len(retained.tensors) == 200
    assert retained.tensors[-1] is made.history[-1]


def test_a_loss_object_a_method_and_a_partial_are_looked_into():
    tracker = Tracker()
    tracker.losses.append(with_graph())
    assert names(model(), tracker) == ["loss.losses"]
    assert names(model(), tracker.loss) == ["loss.losses"]
    assert names(model(), partial(tracker.loss, batch=[])) == ["loss.losses"]
    assert names(model(), partial(model_loss, batch=[with_graph()])) == ["loss"]


def test_a_loss_that_is_a_module_is_one():
    loss = nn.Sequential(nn.Linear(1, 1))
    loss[0].last = with_graph()
    assert names(model(), loss) == ["loss.0.last"]


def test_variables_around_a_function_and_globals_that_it_names_are_looked_into():
    losses = [with_graph()]

    def around(model, batch):
        losses.append(unassigned)

    def of_module(model, batch):
        GLOBAL_LOSSES.append(model(batch))

    around.last = with_graph()
    assert names(model(), around) == ["losses", "around.last"]
    GLOBAL_LOSSES.append(with_graph())
    try:
        assert names(model(), of_module) == ["GLOBAL_LOSSES"]
        assert names(model(), lambda model, batch: None) == []
    finally:
        GLOBAL_LOSSES.clear()
    if losses == []:
        unassigned = None


def test_a_loss_that_has_the_model_finds_nothing_twice():
    made = model()
    made.last = with_graph()
    tracker = Tracker()
    tracker.model = made
    assert names(made, tracker) == ["model.last"]


@pytest.mark.parametrize(("depth", "is_found"), [(1, True), (4, True), (5, True), (6, False)])
def test_what_is_nested_is_looked_into_as_deep_as_a_reader_would(depth, is_found):
    model = nn.Linear(2, 2)
    kept = [model.weight * 2]
    for _ in range(depth - 1):
        kept = [kept]
    model.kept = kept
    assert bool(retained_by(model, lambda *_: None)) is is_found


@pytest.mark.parametrize(("depth", "is_found"), [(1, True), (4, True), (5, False)])
def test_objects_in_objects_are_looked_into_as_deep(depth, is_found):
    model = nn.Linear(2, 2)
    kept = model.weight * 2
    for _ in range(depth):
        outer = Tracker()
        outer.inner = kept
        kept = outer
    model.kept = kept
    assert names(model) == ([f"model.kept{'.inner' * depth}"] if is_found else [])


@pytest.mark.parametrize(("num_later", "is_found"), [(63, True), (64, False)])
def test_of_a_long_list_the_last_64_items_decide(num_later, is_found):
    made = model()
    made.history = [with_graph(), *[torch.ones(1)] * num_later]
    assert bool(retained_by(made, model_loss)) is is_found


def test_of_a_list_only_tensors_with_a_graph_are_retained():
    made = model()
    made.history = [with_graph(), torch.ones(1), "text", with_graph()]
    (retained,) = retained_by(made, model_loss)
    assert [id(tensor) for tensor in retained.tensors] == [id(made.history[0]), id(made.history[3])]
    assert retained.value is made.history


class Slotted:
    """An object whose attributes cannot be listed."""

    __slots__ = ("loss",)


class Table(Mapping):
    """A mapping that does not support reversed iteration."""

    def __init__(self, items):
        self.items_of = items

    def __getitem__(self, key):
        return self.items_of[key]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


def test_what_cannot_be_looked_into_is_taken_to_have_none():
    made = model()
    made.slotted = Slotted()
    made.slotted.loss = with_graph()
    made.table = Table({"loss": with_graph()})
    assert names(made) == []


def test_owners_are_the_function_or_the_object_and_what_it_was_found_in():
    losses = [with_graph()]

    def around(model, batch):
        losses.append(model(batch))

    (retained,) = retained_by(model(), around)
    assert (retained.name, retained.variable, retained.owners) == ("losses", "losses", (around,))
    tracker = Tracker()
    tracker.inner = Tracker()
    tracker.inner.losses.append(with_graph())
    (retained,) = retained_by(model(), tracker)
    assert (retained.name, retained.variable) == ("loss.inner.losses", "losses")
    assert retained.owners == (tracker.inner, tracker, Tracker)
    (retained,) = retained_by(model(), partial(model_loss, losses))
    assert (retained.name, retained.owners) == ("loss", (model_loss,))
