"""What a step refuses, and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.errors import InputError
from plimsoll.run.checks import described, device_of, refuse, refuse_many_labels

MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "optimizer", "precision", "micro_batch", "text"),
    [
        (MODEL, SGD, "fp8", None, "choose fp32, bf16 or fp16"),
        (nn.Linear(2, 2).half(), SGD, "fp16", None, "use model.float"),
        (MODEL, torch.optim.LBFGS(MODEL.parameters()), "fp32", None, "needs a closure"),
        (MODEL, SGD, "fp32", 0, "at least 1"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_the_reason(model, optimizer, precision, micro_batch, text):
    with pytest.raises(InputError, match=text):
        refuse(model, optimizer, precision, micro_batch)


def test_what_can_be_stepped_passes():
    refuse(MODEL, SGD, "bf16", 4)
    assert device_of(MODEL) == torch.device("cpu")


def test_a_model_on_no_device_or_two_is_refused():
    with pytest.raises(InputError, match="no device"):
        device_of(nn.ReLU())
    with pytest.raises(InputError, match="'cpu', 'meta'"):
        device_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))


def test_several_labels_per_sample_need_units():
    refuse_many_labels({"labels": torch.zeros(3)})
    refuse_many_labels((torch.zeros(3, 4),))
    with pytest.raises(InputError, match=r"labels of shape \(3, 4\)"):
        refuse_many_labels({"labels": torch.zeros(3, 4)})


def test_values_are_described():
    assert described(torch.zeros(2, 3)) == "a tensor of shape (2, 3)"
    assert described(None) == "NoneType"
