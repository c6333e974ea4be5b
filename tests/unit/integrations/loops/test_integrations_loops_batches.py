"""The units of a loss, derived from the labels, and joined outputs of evaluation micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.integrations.loops.batches import joined, units_of


class TinyForCausalLM(nn.Module): ...


class TinyForTokenClassification(nn.Module): ...


@pytest.mark.parametrize(
    ("model", "labels", "expected"),
    [
        (TinyForCausalLM(), torch.zeros(2, 3, dtype=torch.long), "next-tokens"),
        (TinyForTokenClassification(), torch.zeros(2, 3, dtype=torch.long), "tokens"),
        (TinyForTokenClassification(), torch.zeros(2, dtype=torch.long), "samples"),
        (TinyForTokenClassification(), torch.zeros(2, 3), "samples"),  # multi-label classification or a regression
        (TinyForTokenClassification(), None, "samples"),
    ],
)
def test_units_by_labels(model, labels, expected):
    assert units_of({"labels": labels}, model) == expected


def test_micro_batches_are_joined_by_what_their_loss_averages_over():
    micro_batches = [
        (torch.tensor(1.0), (torch.zeros(2, 3), {"a": torch.zeros(2)}), torch.zeros(2)),
        (torch.tensor(4.0), (torch.ones(1, 3), {"a": torch.ones(1)}), torch.ones(1)),
    ]
    loss, (logits, more), labels = joined(micro_batches, [2, 1])
    assert loss.item() == 2.0
    assert logits.tolist() == [[0] * 3, [0] * 3, [1] * 3]
    assert more["a"].tolist() == labels.tolist() == [0, 0, 1]


def test_one_micro_batch_and_no_loss_stay_as_they_are():
    one = (None, torch.zeros(2), None)
    assert joined([one], [2]) is one
    loss, logits, labels = joined([one, one], [1, 1])
    assert (loss, len(logits), labels) == (None, 4, None)


def test_texts_of_unequal_length_are_made_as_long_as_the_longest():
    """Micro-batches of an evaluation generate texts of different lengths."""
    micro_batches = [(None, torch.ones(2, 3), None), (None, torch.ones(1, 4), None)]
    _, texts, _ = joined(micro_batches, [2, 1])
    assert texts.tolist() == [[1, 1, 1, -100], [1, 1, 1, -100], [1, 1, 1, 1]]
