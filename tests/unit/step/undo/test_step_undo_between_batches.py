"""Changes that a loop makes between two batches are repeated after an undo, or named in an error."""

import numpy
import pytest
import torch
from torch import nn

from plimsoll.device.base import backend_for
from plimsoll.step.undo.step_state import Undo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.history, self.options = [0], {"a": 0, "b": 0}
        self.plain = torch.zeros(100_000)
        self.array = numpy.zeros(2)


class Counter:
    """An object whose state is only available from its `state_dict`, such as an average of weights."""

    def __init__(self):
        self._hidden = torch.zeros(2)

    def state_dict(self):
        return {"hidden": self._hidden}

    def load_state_dict(self, state):
        self._hidden = state["hidden"]


def paused(model, passes=lambda: None, **options):
    undo = Undo({"model": model}, backend_for("cpu"), **options)
    undo.remember()
    with undo.observing():
        passes()
    undo.passed()
    undo.pause()
    return undo


def test_what_the_loop_changed_is_changed_again_and_what_passes_change_is_theirs():
    model = Model()
    undo = paused(model, lambda: model.options.update(a=1, b=1))
    model.options["b"] = 2
    del model.options["a"]
    model.history.append(5)
    model.array += 3
    undo.resume()
    undo.restore()
    assert (model.options, model.history, model.array.tolist()) == ({"a": 0, "b": 0}, [0], [0.0, 0.0])
    model.options.update(a=1, b=1)  # the passes, again
    undo.again(1)
    assert (model.options, model.history, model.array.tolist()) == ({"b": 2}, [0, 5], [3.0, 3.0])
    assert not undo.lost


def test_what_the_loop_reorders_or_clears_is_so_again():
    model = Model()
    undo = paused(model, lambda: (model.history.append(1), model.options.update(c=3)))
    model.history.reverse()
    model.options["a"] = model.options.pop("a")
    undo.resume()
    undo.restore()
    model.history.append(1)
    model.options["c"] = 3
    undo.again(1)
    assert (model.history, [*model.options]) == ([1, 0], ["b", "c", "a"])


def test_a_list_that_passes_fill_and_the_loop_goes_on_with_its_own_items():
    model = Model()
    undo = paused(model, lambda: model.history.append(1))
    model.history.append(2)
    undo.resume()
    undo.restore()
    model.history.append(-1)
    undo.again(1)
    assert model.history == [0, -1, 2]


def test_state_that_says_itself_is_that_of_the_loop_again():
    counter = Counter()
    undo = paused(Model(), extra_state=[counter])
    counter._hidden += 1
    undo.resume()
    counter._hidden += 1
    undo.restore()
    assert counter._hidden.tolist() == [0.0, 0.0]
    for _ in range(2):
        undo.again(1)
        assert counter._hidden.tolist() == [1.0, 1.0]
        counter._hidden += 1  # which is a copy


def test_what_passes_wrote_before_is_still_missed_after_the_loop_wrote_it():
    """If nothing was copied, version counts must not be reset."""
    model = Model()
    undo = Undo({"model": model}, backend_for("cpu"))
    undo.remember()
    undo.passed()
    undo.observed()
    undo.done()
    undo.remember()
    model.plain += 1
    undo.pause()
    undo.resume()
    undo.restore()
    assert undo.lost == ("model.plain",)


@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize("kind", ["written", "moved", "gradient"])
def test_what_cannot_be_done_again_is_named(kind, is_end):
    model = Model()
    model.linear(torch.ones(1, 2)).sum().backward()
    undo = paused(model, lambda: model.history.append(1))
    undo.observed()
    undo.done()
    undo.remember()
    model.history.append(2)
    undo.pause()
    if kind == "written":
        model.plain += 1
    elif kind == "moved":
        model.plain.data = torch.ones(100_000)
    else:
        model.linear.weight.grad *= 2
    undo.resume(None if is_end else [torch.ones(1)])
    undo.restore()
    named = {"written": "model.plain", "moved": "model.plain", "gradient": "gradients"}
    assert undo.lost == (() if kind == "gradient" and is_end else (named[kind],))
