"""Importance scores of rows, with numbers by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from plimsoll.compression.importance import Rows, activity, best, first_order, norms, read_scores
from plimsoll.compression.methods import Calibration
from plimsoll.errors import WeightsError


class Sums(nn.Module):
    """A model whose loss is the sum of a layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.layer.weight.data = torch.tensor([[3.0, 4.0]])

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, is_judged: bool = True) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(hidden).sum() if is_judged else None)


def some() -> Iterator[dict[str, Tensor]]:
    yield {"hidden": torch.tensor([[[1.0, -1.0], [2.0, 0.0]]]), "attention_mask": torch.tensor([[1, 0]])}
    yield {"hidden": torch.tensor([[[-3.0, 0.0], [0.0, 0.0]]]), "attention_mask": torch.tensor([[1, 1]])}


def test_norms_are_of_rows_along_a_dimension():
    weight = torch.tensor([[3.0, 0.0], [4.0, 2.0]])
    assert norms(weight, 0).tolist() == [3.0, 20**0.5]
    assert norms(weight, 1).tolist() == [5.0, 2.0]
    assert norms(weight[1], 0).tolist() == [4.0, 2.0]


def test_the_best_are_in_order_and_of_equal_ones_the_first_stay():
    assert best(torch.tensor([1.0, 3.0, 2.0, 3.0, 1.0]), 4).tolist() == [0, 1, 2, 3]
    assert best(None, 2).tolist() == [0, 1]


def test_taylor_is_what_the_loss_would_lose_by_batch_without_its_sign():
    model = Sums()
    model.layer.weight.requires_grad_(False)
    weights = [(model.layer.weight, 1, 1), (model.layer.weight, 0, 1)]
    by_input, by_output = first_order(model, weights, Calibration(some))
    # 3 * (1 + 2) and 4 * -1, then 3 * -3 and 0; the sum of both inputs is 9 - 4, then -9
    assert by_input.tolist() == [9.0 + 9.0, 4.0]
    assert by_output.tolist() == [5.0 + 9.0]
    assert model.layer.weight.grad is None
    assert not model.layer.weight.requires_grad


def test_activity_leaves_padding_out():
    model = Sums()
    assert activity(model, [model.layer], Calibration(some))[0].tolist() == [4 / 3, 1 / 3]
    read = read_scores(model, "activation", [Rows(model.layer, 1)], Calibration(some))
    assert read[0].tolist() == [4.0, 4 / 3]


def test_data_that_is_missing_is_said():
    model = Sums()
    for importance in ("taylor", "activation"):
        with pytest.raises(WeightsError, match=f"={importance} needs data, but there are 0 batches: give some"):
            read_scores(model, importance, [Rows(model.layer, 1)], Calibration())
    without_labels = Calibration(lambda: iter([{"hidden": torch.ones(1, 1, 2), "is_judged": False}]))
    with pytest.raises(WeightsError, match="none for a batch of hidden, is_judged: give batches with labels"):
        first_order(model, [(model.layer.weight, 1, 1)], without_labels)
    with pytest.raises(WeightsError, match="cannot score 1 of 2 layers .*because no batch passes through them"):
        activity(model, [model.layer, nn.Linear(1, 1)], Calibration(some))
