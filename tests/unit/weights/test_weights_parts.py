"""The plain tensors of a weight, and their bytes."""

import torch
from torch import nn
from torchao.quantization import Int8Tensor, PerRow

from plimsoll.weights.parts import cast_saved, is_made_of_parts, model_bytes, plain_parts, stored_bytes, with_parts


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


def test_what_is_not_saved_keeps_its_type():
    model = nn.Linear(2, 2)
    model.register_buffer("frequencies", torch.ones(2), persistent=False)
    model.register_buffer("mean", torch.ones(2))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    cast_saved(model, torch.bfloat16)
    types = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert types == {
        "weight": torch.bfloat16, "bias": torch.bfloat16, "mean": torch.bfloat16, "frequencies": torch.float32,
        "count": torch.int64,
    }  # fmt: skip


def test_what_is_no_tensor_is_no_part():
    class Sharded(torch.Tensor):
        """A tensor like a DTensor: one of its parts is a mesh."""

        def __tensor_flatten__(self):
            return ["local", "mesh"], None

    whole = torch.ones(2).as_subclass(Sharded)
    whole.local, whole.mesh = torch.ones(1), object()
    assert list(plain_parts(whole)) == ["local"]
