"""The location of a model's blocks."""

from __future__ import annotations

from plimsoll.compression.changed_config import block_of
from plimsoll.compression.layers import (
    dense_layers,
    is_of_transformers,
    layer_list,
    linear_weight,
    linears_of_blocks,
    why_no_zeros,
)
from plimsoll.compression.methods import Bundle
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.weights.structure import note, use_parameters_of
from quantized_models import choice_of, made
from shrink_models import bundle


def test_the_blocks_of_each_sort_of_model():
    names = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}
    for name, wanted in names.items():
        model = bundle(name).model
        found = layer_list(model)
        assert found is not None
        assert found[0] == wanted
        assert len(found[1]) == 3
        linears = linears_of_blocks(model)
        assert len(linears) == {"bert": 6, "gpt2": 4, "llama": 7}[name] * 3
        assert block_of(linears[0]) == f"{wanted}.0"
        assert is_of_transformers(model)
    assert layer_list(bundle("lstm-lm").model) is None
    assert not is_of_transformers(bundle("lstm-lm").model)


def test_a_weight_is_seen_as_out_by_in():
    mlp = bundle("gpt2").model.transformer.h[0].mlp
    assert linear_weight(mlp.c_fc).shape == (128, 32)
    attention = bundle("llama").model.model.layers[0].self_attn
    assert linear_weight(attention.k_proj).shape == (16, 32)


def test_layers_that_share_a_weight_are_one():
    model = made("bert")
    before = len(dense_layers(model))
    use_parameters_of(model.bert.encoder.layer[0], model.bert.encoder.layer[1])
    note(model, "shared", "bert.encoder.layer.1", "bert.encoder.layer.0")
    assert len(dense_layers(model)) == before - 6


def test_recurrent_models_are_refused():
    model = build_recurrent({"architecture": "gru", "vocab_size": 20, "embedding_size": 8, "hidden_size": 8})
    fault = why_no_zeros(Bundle(model), choice_of("unstructured", share=0.5))
    assert fault == "unstructured needs a transformers model, and this is a RecurrentLanguageModel: leave it out"
