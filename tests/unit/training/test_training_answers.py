"""The model's answers during an evaluation: recorded by sample, once, and for logits only."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.distributed.ranks import Ranks
from plimsoll.step.oom_boundary import Position
from plimsoll.training.answers import Answers


class Noted(Answers):
    """Answers that record the batches to be counted."""

    def __init__(self, model, position, ranks=None):
        super().__init__(model, position, ranks)
        self.batches = []

    def _answers_of(self, logits):
        return logits * 10

    def _count(self, answered):
        self.batches.append([(sample_id, label.item(), answer.tolist()) for sample_id, label, answer in answered])


class Echo(nn.Module):
    def forward(self, x):
        return SimpleNamespace(logits=x)


def test_the_last_answer_to_each_sample_counts_in_the_order_of_the_batch():
    model, position = Echo(), Position()
    noted = Noted(model, position)
    batch = {"labels": torch.tensor([7, 8])}
    with noted:
        for _ in noted.counted([(batch, np.array([4, 5, 6]))]):  # the last id has no sample in the batch
            for samples, answers in (([0, 1], [1.0, 2.0]), ([1], [3.0]), ([0], [4.0])):
                position.samples = samples
                model(torch.tensor(answers))
    assert noted.batches == [[(4, 7, 40.0), (5, 8, 30.0)]]
    assert not model._forward_hooks


def test_without_logits_nothing_is_counted():
    model = nn.Linear(1, 1)
    noted = Noted(model, Position())
    with noted:
        for batch in noted.counted([({"labels": torch.zeros(1)}, np.array([0]))]):
            model(batch["labels"])
    assert noted.batches == []


class OfTwo(Ranks):
    """One of two ranks, which records the bytes that it sends to the other."""

    def __init__(self):
        super().__init__()
        self.world_size, self.told = 2, b""

    def require_all(self, place=0):
        pass

    def gather_agreed(self, value):
        self.told = pickle.dumps(value)
        return [pickle.loads(self.told), []]


def test_what_is_told_to_other_ranks_grows_with_the_samples_and_not_with_their_square():
    """512 samples of 100 numbers are 200 KiB. A row that is a view of its batch would send the whole batch."""
    model, position, ranks = Echo(), Position(), OfTwo()
    noted = Noted(model, position, ranks)
    with noted:
        for _ in noted.counted([({"labels": torch.zeros(512)}, np.arange(512))]):
            position.samples = range(512)
            model(torch.zeros(512, 100))
    assert 512 * 100 * 4 < len(ranks.told) < 2 * 512 * 100 * 4
    assert len(noted.batches[0]) == 512


def test_passes_that_are_no_evaluation_are_not_counted():
    """A model that is called outside the evaluation adds no answers."""
    model = Echo()
    noted = Noted(model, Position())
    with noted:
        for _ in noted.counted([({"labels": torch.zeros(1)}, np.array([0]))]):
            model(torch.ones(3))
    assert noted.batches == []


def test_answers_of_all_ranks_are_counted_in_the_order_of_the_samples():
    class OfBoth(OfTwo):
        def gather_agreed(self, value):
            others = [(sample_id - 4, np.array(9), answer) for sample_id, _, answer in value]
            return [value, others]

    model, position = Echo(), Position()
    noted = Noted(model, position, OfBoth())
    with noted:
        for _ in noted.counted([({"labels": torch.tensor([7, 8])}, np.array([4, 5]))]):
            position.samples = [1, 0]
            model(torch.tensor([2.0, 1.0]))
    assert noted.batches == [[(0, 9, 10.0), (1, 9, 20.0), (4, 7, 10.0), (5, 8, 20.0)]]


@pytest.mark.parametrize("missing", ["_answers_of", "_count"])
def test_what_does_not_say_what_it_keeps_of_answers_or_how_it_counts_them_cannot_be_made(missing):
    says = {name: getattr(Noted, name) for name in ("_answers_of", "_count") if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (Answers,), says)(Echo(), Position())


def test_answers_of_more_samples_than_are_evaluated_are_an_error():
    model, position = Echo(), Position(samples=[0, 1])
    with Noted(model, position), pytest.raises(ValueError, match="longer than"):
        model(torch.ones(3))
