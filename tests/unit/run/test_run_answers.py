"""What an evaluation sees of a model's answers: by sample, once, and of logits only."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from plimsoll.run.answers import Answers
from plimsoll.run.boundary import Position


class Noted(Answers):
    """Keeps what it is told to count."""

    def __init__(self, model, position):
        super().__init__(model, position)
        self.batches = []

    def _answers_of(self, logits):
        return logits * 10

    def _count(self, answered):
        self.batches.append([(sample_id, label.item(), answer.item()) for sample_id, label, answer in answered])


class Echo(nn.Module):
    def forward(self, x):
        return SimpleNamespace(logits=x)


def test_the_last_answer_to_each_sample_counts_in_the_order_of_the_batch():
    model, position = Echo(), Position()
    noted = Noted(model, position)
    batch = {"labels": torch.tensor([7, 8])}
    with noted:
        for _ in noted.counted([(batch, np.array([4, 5, 6]))]):  # the last id is of a sample beyond the batch
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
