"""The accuracy of a classifier that answers what it is given, so that every share is known by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plimsoll.run.accuracy import Accuracy
from plimsoll.run.failpoints import armed
from plimsoll.run.step import TrainStep


class Parrot(nn.Module):
    """Answers with the class that its input names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, answers, labels):
        logits = nn.functional.one_hot(answers, 3) * self.weight
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


def batch(answers, labels):
    return {"answers": torch.tensor(answers), "labels": torch.tensor(labels)}


# 3 of 4 right, then 0 of 2: half of the six.
BATCHES = [batch([0, 1, 2, 0], [0, 1, 2, 2]), batch([1, 1], [0, 2])]


def evaluated(model, batches):
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Accuracy(model) as accuracy:
        evaluation = step.evaluate(accuracy.counted(batches))
    assert not model._forward_hooks
    return evaluation, accuracy.share()


def test_each_sample_counts_once_however_large_its_batch():
    assert evaluated(Parrot(), BATCHES)[1] == 0.5


@pytest.mark.parametrize("call", [1, 2])
def test_a_batch_that_was_cut_after_an_oom_counts_once(call):
    with armed("evaluation", call):
        evaluation, share = evaluated(Parrot(), BATCHES)
    assert len(evaluation.oom_events) == 1
    assert share == 0.5


def test_passes_of_a_try_that_failed_do_not_count():
    """The first try dies in its second piece, after the first has been seen."""
    with armed("evaluation", 1, 3):
        evaluation, share = evaluated(Parrot(), BATCHES)
    assert [event.next_micro_batch for event in evaluation.oom_events] == [2, 1]
    assert share == 0.5


def test_without_logits_it_is_unknown():
    class Mute(Parrot):
        def forward(self, answers, labels):
            return SimpleNamespace(loss=super().forward(answers, labels).loss)

    assert evaluated(Mute(), BATCHES)[1] is None
