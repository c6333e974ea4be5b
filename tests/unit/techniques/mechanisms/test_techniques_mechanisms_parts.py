"""Every weight of a model is in exactly one part; a tied weight is in the part that needs it first."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from plimsoll.techniques.mechanisms.parts import parts_of

GPT2 = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0)
LLAMA = LlamaConfig(
    num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
BERT = BertConfig(num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50)


def build(auto_class, config):
    with torch.device("meta"):
        return auto_class.from_config(config)


NAMES = {
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2", "output layer", "embeddings", "the rest"],
    "llama": ["model.layers.0", "model.layers.1", "output layer", "embeddings", "the rest"],
    "bert": ["encoder.layer.0", "encoder.layer.1", "embeddings", "the rest"],
    "classifier": ["bert.encoder.layer.0", "bert.encoder.layer.1", "embeddings", "the rest"],
}


@pytest.mark.parametrize(
    ("auto_class", "config", "names"),
    [
        (AutoModelForCausalLM, GPT2, NAMES["gpt2"]),
        (AutoModelForCausalLM, LLAMA, NAMES["llama"]),
        (AutoModel, BERT, NAMES["bert"]),
        (AutoModelForSequenceClassification, BERT, NAMES["classifier"]),
    ],
    ids=NAMES,
)
def test_every_weight_is_in_one_part(auto_class, config, names):
    model = build(auto_class, config)
    parts = parts_of(model)
    assert [part.name for part in parts] == names
    found = [id(weight) for part in parts for weight in part.weights]
    assert sorted(found) == sorted(id(weight) for weight in model.parameters())
    assert sum(part.num_bytes for part in parts) == sum(weight.nbytes for weight in model.parameters())


def test_tied_embeddings_belong_to_the_output_layer():
    parts = {part.name: part for part in parts_of(build(AutoModelForCausalLM, GPT2))}
    assert parts["output layer"].num_bytes == 50 * 16 * 4
    assert parts["embeddings"].num_bytes == 32 * 16 * 4  # of the positions


def test_only_what_a_pass_reads_whole_can_be_streamed():
    parts = parts_of(build(AutoModelForCausalLM, LLAMA))
    assert [part.is_streamable for part in parts] == [True, True, True, False, False]


def test_a_model_without_blocks_is_the_rest():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    assert [(part.name, part.num_bytes) for part in parts_of(model)] == [("embeddings", 160), ("the rest", 60)]
