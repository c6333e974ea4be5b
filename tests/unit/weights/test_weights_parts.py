"""What a weight is made of, and its bytes."""

import torch
from torch import nn
from torchao.quantization import Int8Tensor, PerRow

from plimsoll.weights.parts import is_made_of_parts, model_bytes, plain_parts, stored_bytes, with_parts


def test_a_plain_weight_is_its_own_part():
    weight = nn.Parameter(torch.ones(3, 4))
    assert plain_parts(weight)[""] is weight
    assert not is_made_of_parts(weight)
    assert stored_bytes(weight) == 48
    assert torch.equal(with_parts(weight, torch.neg), -weight)


def test_a_weight_of_torchao_is_counted_by_what_lies_in_memory():
    weight = Int8Tensor.from_hp(torch.randn(3, 4), PerRow())
    assert is_made_of_parts(weight)
    assert stored_bytes(weight) == 3 * 4 + 3 * 4 + 3, "integers, scales in float32, zero points in a byte"
    copied = with_parts(weight, torch.clone)
    assert torch.equal(copied.dequantize(), weight.dequantize())
    assert copied.qdata.data_ptr() != weight.qdata.data_ptr()


def test_weights_of_a_model_are_counted_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert model_bytes(model) == 64
    assert model_bytes(nn.Linear(4, 4, bias=False, device="meta")) == 64
