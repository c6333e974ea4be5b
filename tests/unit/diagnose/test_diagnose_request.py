"""The tensor that was requested, derived from its size."""

import sys

import pytest
import torch

from plimsoll.diagnose.request import tensor_asked, tensors_at_hand

HIDDEN = torch.zeros(4, 32, 48)
HEAD = torch.zeros(1000, 48)


@pytest.mark.parametrize(
    ("at_hand", "shape"),
    [
        ([torch.zeros(300, 70)], (300, 70)),
        ([HIDDEN, HEAD], (4, 32, 1000)),
        ([torch.zeros(2, 4, 128, 16), torch.zeros(2, 4, 100, 16)], (2, 4, 128, 100)),
    ],
)
def test_a_shape_that_explains_the_size(at_hand, shape):
    asked = tensor_asked(torch.Size(shape).numel() * 4, at_hand)
    assert asked is not None
    assert (asked.shape, asked.dtype) == (shape, torch.float32)


@pytest.mark.parametrize("num_bytes", [None, 0, 100, 999_999_999])
def test_a_size_that_nothing_explains(num_bytes):
    assert tensor_asked(num_bytes, [HIDDEN, HEAD]) is None


def test_tensors_at_hand_are_local_variables_and_parameters():
    layer, batch = torch.nn.Linear(3, 5), [torch.zeros(2)]
    found = tensors_at_hand([sys._getframe()])
    assert any(one is layer.weight for one in found)
    assert any(one is batch[0] for one in found)
