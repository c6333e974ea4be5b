"""The method dynamic_int8: integers of seven bits. The tests of int8 cover the shared behaviour."""

import torch

from quantized_models import made, shrunk


def test_without_instructions_for_products_integers_have_seven_bits(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    weight = shrunk("dynamic_int8", made("llama")).model.layers[0].mlp.up_proj.weight
    assert weight.qdata.abs().max() <= 64
    assert weight.act_quant_kwargs.reduce_range
