"""The registry and how a set of techniques is put to work: in order, and wholly or not at all."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import TECHNIQUES, Setting, Technique, conflict_among, in_order, installed, technique_of

SETTING = Setting("cpu", batch_size=4)


class Noted(Technique):
    """A technique that writes down what is done with it."""

    def __init__(self, name, notes, fails=False):
        self.name, self.notes, self.fails = name, notes, fails

    def choices(self, workload, setting):
        return ()

    def conflicts(self, choice, others, workload, setting):
        return "two are too many" if others else None

    @contextmanager
    def install(self, workload, choice):
        if self.fails:
            raise MemoryError
        self.notes.append(f"+{self.name}")
        try:
            yield
        finally:
            self.notes.append(f"-{self.name}")


@pytest.fixture
def workload():
    model = nn.Linear(1, 1)
    return Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples")


@pytest.fixture
def notes(monkeypatch):
    """What was done with `first`, `second` and `failing`, which are registered in this order."""
    found = []
    for name in ("first", "second", "failing"):
        monkeypatch.setitem(TECHNIQUES, name, Noted(name, found, fails=name == "failing"))
    return found


def choices(*names):
    return tuple(Choice(technique=name) for name in names)


def test_a_technique_is_known_by_its_name():
    assert all(technique_of(name).name == name for name in TECHNIQUES)
    with pytest.raises(InputError, match=r"there is no technique `micro_bach`; did you mean `?micro_batch"):
        technique_of("micro_bach")


def test_choices_are_installed_in_the_order_of_the_registry_and_taken_back_in_reverse(workload, notes):
    assert in_order(choices("second", "first")) == choices("first", "second")
    with installed(workload, choices("second", "first")):
        assert notes == ["+first", "+second"]
    assert notes == ["+first", "+second", "-second", "-first"]


def test_where_one_cannot_be_installed_none_is(workload, notes):
    with pytest.raises(MemoryError), installed(workload, choices("failing", "second", "first")):
        raise AssertionError("it was installed")
    assert notes == ["+first", "+second", "-second", "-first"]


def test_they_are_taken_back_where_the_block_fails(workload, notes):
    with pytest.raises(KeyError), installed(workload, choices("first")):
        raise KeyError
    assert notes == ["+first", "-first"]


def test_a_technique_that_does_not_exist_is_named_before_anything_is_installed(workload, notes):
    """As in a plan that another version wrote."""
    with pytest.raises(InputError, match="there is no technique `fist`"), installed(workload, choices("first", "fist")):
        raise AssertionError("it was installed")
    assert notes == []


def test_the_first_conflict_names_its_choice(workload, notes):
    assert conflict_among((micro_batch_choice(2),), workload, SETTING) is None
    assert conflict_among(choices("first"), workload, SETTING) is None
    assert conflict_among((micro_batch_choice(5),), workload, SETTING).startswith(
        "micro_batch=5: a micro-batch of 5 is"
    )
    assert conflict_among(choices("first", "second"), workload, SETTING) == "first: two are too many"
