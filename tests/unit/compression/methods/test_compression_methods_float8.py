"""float8: numbers close to the dense model's, a file that is smaller, and the same outputs when it is loaded again."""

import pytest
import torch

from plimsoll.models.loading import load_model
from plimsoll.weights.parts import model_bytes
from quantized_models import logits, made, shrunk


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_it_is_small_and_close_and_loads_as_it_was(name, tmp_path):
    dense = made(name)
    expected, dense_bytes = logits(dense), model_bytes(dense)
    model = shrunk("float8", dense)
    assert torch.allclose(logits(model), expected, atol=2e-5)
    assert not torch.equal(logits(model), expected)
    num_linear = {"bert": 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32, "llama": 2 * (3 * 32 * 32 + 3 * 32 * 64)}[name]
    assert dense_bytes - model_bytes(model) > 0.7 * 4 * num_linear
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path).model), logits(model))


def test_sizes_are_known_without_values():
    assert model_bytes(shrunk("float8", made("bert").to("meta"))) == model_bytes(shrunk("float8", made("bert")))


def test_multiplying_in_float8_needs_a_gpu_for_it():
    from plimsoll.compression.methods import SHRINKERS, Bundle
    from quantized_models import choice_of

    bundle, choice = Bundle(made("bert")), choice_of("float8", dynamic=True)
    if torch.cuda.is_available():
        pytest.skip("there may be a GPU for it")
    assert "needs a GPU of compute capability 8.9 or more" in SHRINKERS["float8"].refusal(bundle, choice)
    assert SHRINKERS["float8"].choices(bundle) == SHRINKERS["float8"].refusal(bundle, choice)
