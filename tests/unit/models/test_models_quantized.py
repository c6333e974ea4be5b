"""Integers of torchao made a block of rows at a time: bitwise those of the whole weight."""

import pytest
import torch
import transformers
from torch import nn

from checkpoints import saved
from plimsoll.errors import WeightsError
from plimsoll.models import quantized
from plimsoll.models.loading import load_model
from plimsoll.models.quantized import can_be_quantized


def plainly_quantized(folder, kind: str) -> nn.Module:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = Int8WeightOnlyConfig() if kind == "int8" else PrototypeInt4WeightOnlyConfig(group_size=32)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    return model


@pytest.mark.parametrize("place", ["memory", "mapped"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_are_those_of_torchao_on_the_whole_model(kind, place, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "_BLOCK_NUMBERS", 64 * 32)  # so that there are several blocks, the last one smaller
    saved("llama", tmp_path, intermediate_size=160)
    loaded = load_model(tmp_path, dtype=torch.bfloat16, quantize=kind, place=place)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(loaded.model(ids).logits, plainly_quantized(tmp_path, kind)(ids).logits)
    assert type(loaded.model.lm_head.weight.data) is torch.Tensor


def test_a_model_without_linear_layers_is_refused(tmp_path):
    saved("gpt2", tmp_path)
    with pytest.raises(WeightsError, match="quantize int8 finds nothing in a GPT2LMHeadModel"):
        load_model(tmp_path, quantize="int8")


def test_int4_is_of_layers_that_the_kernel_can_have():
    assert can_be_quantized(nn.Linear(7, 5), "int8")
    assert not can_be_quantized(nn.Linear(64, 24), "int4")
    assert not can_be_quantized(nn.Linear(48, 64), "int4")
    assert not can_be_quantized(nn.Embedding(64, 64), "int8")
    with pytest.raises(WeightsError, match="int4 is not made on device cuda: use int8"):
        quantized._config_of("int4", torch.device("cuda"))
