"""Copies of the weights that variables keep alive, in every place where a user may keep them."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plimsoll.diagnose.of_error import Before, backend_of, evidence_of_error


def build():
    return nn.Sequential(
        nn.Embedding(1000, 64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False), nn.Linear(64, 1000)
    )


class Training:
    """A model after one step, and a function that returns a saved and loaded copy."""

    def __init__(self):
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.step(torch.randint(1000, (4, 8)))
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.saved = lambda: copy.deepcopy(states)

    def step(self, ids):
        self.model(ids).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resume(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    @property
    def weight_bytes(self):
        return sum(one.nbytes for one in self.model.parameters())


@pytest.fixture
def training():  # new for each test: objects from before a test are frozen, and the collector omits them
    return Training()


def fail():
    torch.empty(1 << 60, dtype=torch.uint8)  # no machine has so much memory


def copies_at(function, *arguments):
    """Return the copies that are found after the function has raised, and the sizes by category."""
    with pytest.raises(RuntimeError) as raised:
        function(*arguments)
    backend, _ = backend_of(raised.value)
    evidence = evidence_of_error(raised.value, backend, Before(), sys._getframe())
    return [one for one in evidence.seen.kept if one.copy_of], {one.category: one.num_bytes for one in evidence.shares}


def loaded(training):
    return training.saved()


def in_a_variable(training):
    something = loaded(training)
    training.resume(something)
    fail()


def in_an_attribute(training):
    trainer = SimpleNamespace(state=SimpleNamespace(last=None))
    trainer.state.last = loaded(training)
    training.resume(trainer.state.last)
    fail()


def given_on(training):
    given = loaded(training)
    _trained_with(training, given)


def _trained_with(training, checkpoint):
    training.resume(checkpoint)
    fail()


def in_a_global_variable(training):
    global OF_THE_MODULE
    OF_THE_MODULE = loaded(training)
    training.resume(OF_THE_MODULE)
    fail()


def the_best_weights(training):
    best = copy.deepcopy(training.model.state_dict())
    fail()
    del best


def an_average(training):
    shadow = {name: one.detach().clone() for name, one in training.model.named_parameters()}
    fail()
    del shadow


def a_list_without_names(training):
    anchor = [one.detach().half().float() + 1 for one in training.model.parameters()]
    fail()
    del anchor


def a_second_model(training):
    ema = copy.deepcopy(training.model).requires_grad_(False)
    fail()
    del ema


@pytest.mark.parametrize(
    ("function", "name", "of", "code"),
    [
        (in_a_variable, "something", "checkpoint", "something = loaded(training)"),
        (in_an_attribute, "trainer.state.last", "checkpoint", "trainer.state.last = loaded(training)"),
        (given_on, "given", "checkpoint", "given = loaded(training)"),
        (in_a_global_variable, "OF_THE_MODULE", "checkpoint", "OF_THE_MODULE = loaded(training)"),
        (the_best_weights, "best", "weights", "best = copy.deepcopy(training.model.state_dict())"),
        (an_average, "shadow", "weights", "shadow = {"),
        (a_list_without_names, "anchor", "weights", "anchor = ["),
        (a_second_model, "ema", "model", "ema = copy.deepcopy("),
    ],
)
def test_it_is_found_where_it_is_with_what_nothing_else_uses(training, function, name, of, code):
    (found,), shares = copies_at(function, training)
    globals().pop("OF_THE_MODULE", None)
    assert (found.name, found.copy_of) == (name, of)
    assert found.num_bytes == pytest.approx(training.weight_bytes, rel=0.01)  # the optimizer has taken over its states
    assert found.code.startswith(code)
    assert "test_diagnose_copies.py:" in found.place
    assert shares.get("inputs", 0) < training.weight_bytes / 4


def test_a_checkpoint_that_nothing_was_loaded_from_counts_whole(training):
    def fails_early():
        early = training.saved()
        fail()
        del early

    (found,), _ = copies_at(fails_early)
    assert (found.name, found.copy_of) == ("early", "checkpoint")
    assert found.num_bytes == pytest.approx(3 * training.weight_bytes, rel=0.01)


def test_what_the_training_uses_and_what_is_a_batch_is_no_copy(training):
    weights = training.model.state_dict()
    states = training.optimizer.state_dict()
    gradients = {name: one.grad for name, one in training.model.named_parameters()}
    batch = {"input_ids": torch.zeros(64, 1000), "labels": torch.zeros(64, 64), "mask": torch.ones(256, 64)}
    found, shares = copies_at(fail)
    assert found == []
    assert shares["inputs"] >= sum(one.nbytes for one in batch.values())
    del weights, states, gradients


def test_a_model_that_runs_with_weights_of_a_dict_has_no_copy(training):
    """`functional_call` with trained weights of a dict: they are the model, not a copy."""
    weights = {name: one.detach().clone().requires_grad_() for name, one in training.model.named_parameters()}
    loss = torch.func.functional_call(training.model, weights, (torch.zeros(4, 8, dtype=torch.long),)).sum()
    found, _ = copies_at(fail)
    assert found == []
    del loss


def test_a_wrapper_of_the_model_is_no_second_one(training):
    wrapped = nn.Sequential(training.model)
    found, _ = copies_at(fail)
    assert found == []
    del wrapped
