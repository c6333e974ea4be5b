"""The registry, and the installation of a set of techniques: in order, and completely or not at all."""

import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.models.names import require_technique
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import TECHNIQUES, Setting, Technique, conflict_among, in_order, installed, technique_of

SETTING = Setting("cpu", batch_size=4)


class Noted(Technique):
    """A technique that records its calls."""

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
    """Register `first`, `second` and `failing`, in this order, and return the list of their calls."""
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
    """A plan of another version may contain one."""
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


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """Return a function that installs a package whose program provides a technique; the registry is then rebuilt."""

    def bring(program, entry="rests = brought_by_a_test:Rests"):
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "brought_by_a_test", raising=False)
        (tmp_path / "brought_by_a_test.py").write_text(program)
        (tmp_path / "brought-1.dist-info").mkdir()
        (tmp_path / "brought-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        (tmp_path / "brought-1.dist-info" / "entry_points.txt").write_text(f"[plimsoll.techniques]\n{entry}\n")
        monkeypatch.delitem(vars(TECHNIQUES), "data")

    return bring


RESTS = """
from contextlib import nullcontext
from plimsoll.techniques import Technique

class Rests(Technique):
    name, numerics, summary, stage = "rests", "bitwise", "nothing is done", "model"
    choices = lambda self, workload, setting: ()
    install = lambda self, workload, choice: nullcontext()
"""


def test_another_package_brings_one_by_an_entry_point(brought, workload):
    brought(RESTS)
    require_technique("rests")
    assert "brought_by_a_test" not in sys.modules
    assert in_order(choices("heap", "rests", "lora")) == choices("lora", "rests", "heap")
    with installed(workload, choices("rests")):
        assert technique_of("rests").summary == "nothing is done"


@pytest.mark.parametrize(
    ("program", "entry", "fault"),
    [
        ("", "rests = brought_by_a_test:Rests", "has no attribute 'Rests'"),
        (RESTS, "rests = not_there:Rests", "No module named 'not_there'"),
        (RESTS, "rest = brought_by_a_test:Rests", "must be a `Technique` whose name is `rest`"),
        (RESTS.replace("rests", "lora"), "lora = brought_by_a_test:Rests", "the only one of that name"),
        ("Rests = 1", "rests = brought_by_a_test:Rests", "must be a `Technique`"),
        ("raise RuntimeError('no licence')", "rests = brought_by_a_test:Rests", "RuntimeError: no licence"),
        (RESTS.replace("choices =", "menu ="), "rests = brought_by_a_test:Rests", "it has no choices"),
        (RESTS.replace("bitwise", "odd"), "rests = brought_by_a_test:Rests", "its numerics are 'odd'"),
        (RESTS.replace('"model"', '"late"'), "rests = brought_by_a_test:Rests", "its stage is 'late'"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_where_it_is_from(program, entry, fault, brought):
    brought(program, entry)
    with pytest.raises(InputError, match=f"cannot use .*{fault}.*; remove the package that brings it, brought"):
        technique_of("heap")
