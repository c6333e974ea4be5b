"""The method unstructured: some weights are zero, and the size stays the same."""

import torch

from plimsoll.compression.methods import SHRINKERS, Bundle
from plimsoll.weights.parts import model_bytes
from quantized_models import made, shrunk


def test_the_smallest_share_of_each_layer_is_zero_and_nothing_is_smaller(tmp_path):
    dense, model = made("llama"), shrunk("unstructured", made("llama"), share=0.25)
    before, after = (one.model.layers[1].mlp.up_proj.weight for one in (dense, model))
    assert (after == 0).sum() == 64 * 32 // 4
    assert before[after == 0].abs().max() <= after[after != 0].abs().min()
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    assert model_bytes(model) == model_bytes(dense)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in dense.named_parameters()}
    dense.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "zeros")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("dense", "zeros")]
    assert sizes[0] == sizes[1]


def test_it_is_not_offered_and_says_why():
    said = SHRINKERS["unstructured"].choices(Bundle(made("bert")))
    assert "saves nothing: zeros are stored and multiplied like any number, 0 bytes of the file" in said


def test_sizes_are_known_without_values():
    assert model_bytes(shrunk("unstructured", made("bert").to("meta"))) == model_bytes(made("bert"))
