"""The method int8_embeddings, alone or before a method for layers: only the token embedding is quantized."""

import torch
from torch import nn

from plimsoll.compression.methods import SHRINKERS, Bundle
from plimsoll.models.loading import load_model
from plimsoll.weights.coded_layers import CodedEmbedding
from plimsoll.weights.parts import model_bytes
from quantized_models import choice_of, logits, made, shrunk


def test_the_table_of_tokens_is_small_and_loads_as_it_was(tmp_path):
    dense = made("bert")
    expected, dense_bytes = logits(dense), model_bytes(dense)
    model = shrunk("int8_embeddings", dense)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert dense_bytes - model_bytes(model) == 100 * (3 * 32 - 5)
    assert type(model.bert.embeddings.position_embeddings) is nn.Embedding
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).model
    assert type(loaded.bert.embeddings.word_embeddings) is CodedEmbedding
    assert torch.equal(logits(loaded), logits(model))


def test_the_layers_may_follow(tmp_path):
    model = shrunk("int8", shrunk("int8_embeddings", made("llama")))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path, place="mapped").model), logits(model))


def test_a_table_that_is_the_output_too_is_refused():
    fault = SHRINKERS["int8_embeddings"].choices(Bundle(made("gpt2")))
    assert "the embedding of 100 tokens is shared with another layer" in fault


def test_it_is_done_once():
    model = shrunk("int8_embeddings", made("bert"))
    fault = SHRINKERS["int8_embeddings"].refusal(Bundle(model), choice_of("int8_embeddings"))
    assert fault == "int8_embeddings: the 100 token embeddings are already quantized: leave it out"
