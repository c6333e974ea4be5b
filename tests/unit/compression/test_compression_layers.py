"""Where a model has its blocks."""

from __future__ import annotations

from plimsoll.compression.layers import block_of, is_of_transformers, layer_list, linear_weight, linears_of_blocks
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
