"""Shared behaviour of the torchao methods: the layers they quantize, and their refusals."""

import torch
from safetensors import safe_open
from torch import nn

from plimsoll.compression.methods import SHRINKERS, Bundle
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.weights import torchao_layers
from plimsoll.weights.torchao_layers import linear_layers, plain_layers
from quantized_models import choice_of, made, shrunk

METHODS = ("int8", "int4", "dynamic_int8", "float8")


def test_layers_are_those_of_the_base_model_and_not_its_head():
    assert "classifier" not in linear_layers(made("bert"))
    assert "bert.pooler.dense" in linear_layers(made("bert"))
    assert "lm_head" not in linear_layers(made("llama"))
    assert len(linear_layers(made("llama"))) == 2 * 7


def test_a_weight_that_another_module_has_too_is_left():
    model = made("llama")
    model.lm_head.weight = model.model.layers[0].self_attn.q_proj.weight
    assert len(plain_layers(model)) == 2 * 7 - 1


def test_models_of_other_kinds_are_refused():
    fields = {"architecture": "lstm", "vocab_size": 20, "embedding_size": 8, "hidden_size": 8}
    for method in METHODS:
        fault = SHRINKERS[method].choices(Bundle(build_recurrent(fields)))
        assert "is for models of transformers, and this is a RecurrentLanguageModel" in fault


def test_what_is_quantized_is_refused():
    model = shrunk("int8", made("bert"))
    fault = SHRINKERS["dynamic_int8"].refusal(Bundle(model), choice_of("dynamic_int8"))
    assert fault == "dynamic_int8: 13 of 13 linear layers are quantized already; give the dense model"


def test_without_torchao_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(torchao_layers, "find_spec", lambda name: None)
    fault = SHRINKERS["int8"].choices(Bundle(made("bert")))
    assert fault == "int8 needs torchao, which is not installed: `pip install torch-plimsoll[quantize]`"


def test_options_that_there_are_not():
    bundle = Bundle(made("bert"))
    assert SHRINKERS["int8"].refusal(bundle, choice_of("int8", bits=4)) == (
        "`int8` has no option `bits` (4): it takes no options; leave it out"
    )
    fault = SHRINKERS["int4"].refusal(bundle, choice_of("int4", group="all"))
    assert fault == "`group` cannot be all: give one of 32, 64, 128"


def test_the_configuration_says_what_transformers_would():
    model = shrunk("int8", made("bert"))
    said = model.config.to_dict()["quantization_config"]
    assert said["modules_to_not_convert"] == ["classifier"]
    assert said["quant_type"]["default"]["_type"] == "Int8WeightOnlyConfig"
    assert type(model.classifier) is nn.Linear
    assert type(model.classifier.weight.data) is torch.Tensor


def test_packed_weights_are_written_in_the_form_of_files(tmp_path):
    shrunk("int4", made("llama")).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names, said = set(file.keys()), file.metadata()
    assert {f"model.layers.0.mlp.up_proj._weight_{part}" for part in ("qdata", "scale", "zero_point")} <= names
    assert '"Int4Tensor"' in said["model.layers.0.mlp.up_proj.weight"]
