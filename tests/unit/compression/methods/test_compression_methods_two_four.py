"""The method two_four: two of every four weights in a row are zero, and the size stays the same."""

import torch
from torch import nn

from plimsoll.compression.methods import SHRINKERS, Bundle, two_four
from plimsoll.weights.parts import model_bytes
from quantized_models import made, shrunk


def test_two_of_four_are_zero_along_what_goes_in():
    model = shrunk("two_four", made("gpt2"))
    weight = model.transformer.h[0].mlp.c_fc.weight  # a Conv1D: (in, out)
    assert torch.equal((weight.t().reshape(-1, 4) == 0).sum(dim=1), torch.full((32 * 128 // 4,), 2))
    weight = shrunk("two_four", made("llama")).model.layers[0].mlp.down_proj.weight
    assert ((weight.reshape(-1, 4) == 0).sum(dim=1) == 2).all()
    assert model_bytes(model) == model_bytes(made("gpt2"))


def test_the_largest_stay_and_of_equals_the_first():
    layer = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -3.0, 2.0, 0.5, 7.0, 7.0, 7.0, 7.0]]))
        two_four._thin_out(layer.weight)
    assert layer.weight.tolist() == [[0.0, -3.0, 2.0, 0.0, 7.0, 7.0, 0.0, 0.0]]


def test_it_is_not_offered_and_says_why():
    method = SHRINKERS["two_four"]
    assert "0 bytes and 0 seconds; on a GPU of compute capability 8.0 or more" in method.choices(Bundle(made("bert")))
