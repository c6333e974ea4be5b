"""Which layers get zeros."""

from plimsoll.compression.methods import Bundle
from plimsoll.compression.zeros import layers_of, why_no_zeros
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.weights.structure import note, use_parameters_of
from quantized_models import choice_of, made


def test_layers_that_share_a_weight_are_one():
    model = made("bert")
    before = len(layers_of(model))
    use_parameters_of(model.bert.encoder.layer[0], model.bert.encoder.layer[1])
    note(model, "shared", "bert.encoder.layer.1", "bert.encoder.layer.0")
    assert len(layers_of(model)) == before - 6


def test_recurrent_models_are_refused():
    model = build_recurrent({"architecture": "gru", "vocab_size": 20, "embedding_size": 8, "hidden_size": 8})
    fault = why_no_zeros(Bundle(model), choice_of("unstructured", share=0.5))
    assert fault == "unstructured is for models of transformers, and this is a RecurrentLanguageModel: leave it out"
