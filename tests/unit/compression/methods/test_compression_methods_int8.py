"""The methods int8, dynamic_int8 and float8: close to the dense model, smaller files, equal outputs after loading."""

import pytest
import torch

from plimsoll.models.loading import load_model
from plimsoll.weights.parts import model_bytes
from quantized_models import logits, made, shrunk

METHODS = ("int8", "dynamic_int8", "float8")


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_small_and_close_and_loads_as_it_was(method, name, tmp_path):
    dense = made(name)
    expected, dense_bytes = logits(dense), model_bytes(dense)
    model = shrunk(method, dense)
    assert torch.allclose(logits(model), expected, atol=2e-5)
    assert not torch.equal(logits(model), expected)
    num_linear = {"bert": 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32, "llama": 2 * (3 * 32 * 32 + 3 * 32 * 64)}[name]
    assert dense_bytes - model_bytes(model) > 0.7 * 4 * num_linear
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path).model), logits(model))


@pytest.mark.parametrize("method", METHODS)
def test_sizes_are_known_without_values(method):
    assert model_bytes(shrunk(method, made("bert").to("meta"))) == model_bytes(shrunk(method, made("bert")))
