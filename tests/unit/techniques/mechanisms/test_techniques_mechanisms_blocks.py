"""The layers of a transformer are found in any place of a model; modules that only look similar are not."""

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM

from plimsoll.techniques.mechanisms.blocks import blocks_of
from technique_models import WITH_BLOCKS, Blocks, StackedLstm, fresh, gpt2_with, t5
from workloads import Cnn, Lstm

NAMES = {
    "gpt2": "transformer.h.0 transformer.h.1",
    "gpt2_with_cache": "transformer.h.0 transformer.h.1",
    "bert": "bert.encoder.layer.0 bert.encoder.layer.1",
    "t5": "encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.1",
    "llama": "model.layers.0 model.layers.1 model.layers.2",
    "blocks": "block1 block2 block3",
    "lstms": "layers.0 layers.1 layers.2",
}


def names_of(model):
    return " ".join(name for name, _ in blocks_of(model))


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_blocks_in_the_order_of_the_model(name):
    model, _ = fresh(name)
    assert names_of(model) == NAMES[name]
    assert all(model.get_submodule(name) is block for name, block in blocks_of(model))


@pytest.mark.parametrize("build", [gpt2_with, t5, Blocks, StackedLstm])
def test_also_without_memory(build):
    with torch.device("meta"):
        assert blocks_of(build())


@pytest.mark.parametrize("build", [Lstm, Cnn, lambda: nn.Linear(2, 2), lambda: nn.Embedding(2, 2)])
def test_models_without_blocks(build):
    assert blocks_of(build()) == ()


def test_a_model_of_one_layer_and_a_layer_that_is_used_again():
    assert names_of(gpt2_with(n_layer=1)) == "transformer.h.0"
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "embedding_size": 16}
    assert names_of(AlbertForMaskedLM(AlbertConfig(**sizes, num_hidden_layers=4, vocab_size=50))) == (
        "albert.encoder.albert_layer_groups.0"
    )


def mlp(width):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))


def test_small_parts_that_repeat_are_no_blocks():
    """The model has two heads of 16 x 8 next to a recurrent net, and next to blocks."""
    model = nn.Module()
    model.rnn = nn.LSTM(16, 64)
    model.heads = nn.ModuleList([mlp(8), mlp(8)])
    assert blocks_of(model) == ()
    model.body = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 256) for _ in range(6)])
    assert names_of(model) == " ".join(f"body.{number}" for number in range(6))


def test_two_kinds_of_layers_and_layers_inside_layers():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([mlp(64), mlp(64), mlp(64)])

    kinds = [nn.TransformerEncoderLayer(16, 2, 64), Experts()] * 2
    model = nn.ModuleDict({"layers": nn.ModuleList([*kinds, nn.TransformerEncoderLayer(16, 2, 64), Experts()])})
    assert names_of(model) == "layers.0 layers.1 layers.4 layers.5"  # 2 and 3 are the same objects as 0 and 1
