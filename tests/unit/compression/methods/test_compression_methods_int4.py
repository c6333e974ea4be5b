"""The method int4: the layers that its kernel supports, and equal outputs after loading."""

import pytest
import torch

from plimsoll.compression.methods import SHRINKERS, Bundle
from plimsoll.models.loading import load_model
from plimsoll.weights.parts import model_bytes
from quantized_models import choice_of, logits, made, shrunk


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_it_is_close_and_loads_as_it_was(name, compute, place, tmp_path):
    dense = made(name)
    expected = logits(dense)
    model = shrunk("int4", dense, compute=compute)
    assert 0 < (logits(model).float() - expected).abs().max() < 1e-2
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, place=place).model
    assert torch.equal(logits(loaded), logits(model))
    assert model_bytes(loaded) == model_bytes(model)
    assert logits(loaded).dtype == (torch.bfloat16 if compute == "bf16" else torch.float32)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_sizes_are_known_without_values(compute):
    sized = shrunk("int4", made("bert").to("meta"), compute=compute)
    assert model_bytes(sized) == model_bytes(shrunk("int4", made("bert"), compute=compute))


def test_it_is_what_load_model_makes_of_the_dense_folder(tmp_path):
    made("llama").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, quantize="int4").model
    assert torch.equal(logits(loaded), logits(shrunk("int4", made("llama"), group=32, compute="fp32")))


def test_layers_that_the_kernel_has_not_stay_dense():
    model = shrunk("int4", made("llama", intermediate_size=72))  # 72 is a multiple of neither 16 nor 32
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj.weight).__name__ == "Int4OpaqueTensor"
    assert type(layer.mlp.up_proj.weight.data) is torch.Tensor


def test_sizes_without_a_kernel_are_refused():
    bundle = Bundle(made("bert", hidden_size=24, intermediate_size=40))
    fault = SHRINKERS["int4"].choices(bundle)
    assert fault == (
        "int4(group=32): no linear layer has a multiple of 32 inputs and a multiple of 16 outputs (24 x 24, 24 x 40, "
        "40 x 24): use int8"
    )


def test_small_and_large_groups_are_offered():
    assert SHRINKERS["int4"].choices(Bundle(made("bert", hidden_size=128))) == (
        choice_of("int4", group=32),
        choice_of("int4", group=128),
    )


def test_what_decodes_to_float32_does_not_go_with_bfloat16():
    bundle = Bundle(shrunk("int8_embeddings", made("bert")))
    fault = SHRINKERS["int4"].refusal(bundle, choice_of("int4"))
    assert "word_embeddings.weight is already quantized and decodes to float32: give compute=fp32" in fault
    assert SHRINKERS["int4"].refusal(bundle, choice_of("int4", compute="fp32")) is None
    assert SHRINKERS["int4"].refusal(bundle, choice_of("int4")).endswith("give compute=fp32 or use int4 alone")
    half = Bundle(shrunk("int8_embeddings", shrunk("bf16", made("bert"))))
    assert SHRINKERS["int4"].refusal(half, choice_of("int4")) is None
    assert "decodes to bfloat16: give" in SHRINKERS["int4"].refusal(half, choice_of("int4", compute="fp32"))
    assert logits(shrunk("int4", half.model)).isfinite().all()
