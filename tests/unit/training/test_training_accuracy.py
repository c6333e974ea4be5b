"""The accuracy of a classifier that repeats its input as its answer, so that each share is known by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.models.hooks import StepHooks
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques.mechanisms.lengths import CutByLength
from plimsoll.training.accuracy import Accuracy


class Parrot(nn.Module):
    """A model that answers with the class that its input names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, answers, labels):
        logits = nn.functional.one_hot(answers, 3) * self.weight
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


def batch(answers, labels, first=0):
    fields = {"answers": torch.tensor(answers), "labels": torch.tensor(labels)}
    return fields, np.arange(first, first + len(answers))


# 3 of 4 are right, then 0 of 2: half of the six.
BATCHES = [batch([0, 1, 2, 0], [0, 1, 2, 2]), batch([1, 1], [0, 2])]


def evaluated(model, batches, windows=None):
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Accuracy(model, step.position, windows) as accuracy:
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
    """The first attempt fails in its second micro-batch, after the first has been counted."""
    with armed("evaluation", 1, 3):
        evaluation, share = evaluated(Parrot(), BATCHES)
    assert [event.next_micro_batch for event in evaluation.oom_events] == [2, 1]
    assert share == 0.5


def test_without_logits_it_is_unknown():
    class Mute(Parrot):
        def forward(self, answers, labels):
            return SimpleNamespace(loss=super().forward(answers, labels).loss)

    assert evaluated(Mute(), BATCHES)[1] is None


class Texts:
    """Positions of samples: text 0 has samples 0 to 2, text 1 samples 3 and 4, and text 2 sample 5."""

    def parents(self, ids):
        return np.array([0, 0, 0, 1, 1, 2])[ids]

    def num_of_parents(self, parents):
        return np.array([3, 2, 1])[parents]


@pytest.mark.parametrize("failing", [(), (1,), (1, 3), (2,)])
def test_of_windows_the_texts_are_counted_by_the_mean_of_their_logits(failing):
    # Text 0: two of three windows vote for 1, which is right. Text 1: the votes for 0 and 2 are a tie, which the first
    # class wins, and it is wrong. Text 2 is right.
    batches = [batch([1, 1, 0, 2], [1, 1, 1, 2]), batch([0, 0], [2, 0], first=4)]
    with armed("evaluation", *failing):
        assert evaluated(Parrot(), batches, Texts())[1] == 2 / 3


def test_a_text_of_which_windows_are_missing_is_not_counted_yet():
    first, second, third = batch([1], [1]), batch([0], [1], first=1), batch([1], [1], first=2)
    assert evaluated(Parrot(), [first, second], Texts())[1] is None
    assert evaluated(Parrot(), [first, second, third], Texts())[1] == 1.0


def test_samples_that_a_pass_has_in_another_order_are_told_apart():
    """The order is as in `by_length`: the longest first."""
    texts = Texts()
    ids = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [2, 1, 1, 1]])
    mask = (torch.arange(4) < torch.tensor([[1], [2], [3], [4]])).long()
    fields = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 1, 1, 2])}

    class First(Parrot):
        def forward(self, input_ids, attention_mask, labels):
            return super().forward(input_ids[:, 0], labels)

    model = First()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=1)
    step.workload.hooks = StepHooks(cut=CutByLength())
    with Accuracy(model, step.position, texts) as accuracy:
        step.evaluate(accuracy.counted([(fields, np.arange(4)), batch_of_one()]))
    assert accuracy.share() == 1.0


def batch_of_one():
    fields = {"input_ids": torch.tensor([[2]]), "attention_mask": torch.tensor([[1]]), "labels": torch.tensor([2])}
    return fields, np.array([4])
