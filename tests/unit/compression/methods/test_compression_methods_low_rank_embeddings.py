"""The token embedding as two factors, and the output that is tied to it."""

from __future__ import annotations

import torch
from torch import nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.low_rank_embeddings import LowRankEmbeddings
from plimsoll.records.plan import Choice
from shrink_models import CORPUS, bundle, ids_of, num_bytes, outputs

METHOD = LowRankEmbeddings()


def choice(**options) -> Choice:
    return Choice(technique="low_rank_embeddings", options=options)


def with_rank(given: Bundle, rank: int) -> Bundle:
    """Give the token embedding of a model the rank `rank`."""
    table = given.model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(torch.randn(len(table), rank) @ torch.randn(rank, table.shape[1]) * 0.05)
    return given


def test_a_table_that_has_the_rank_already_loses_nothing():
    for name in ("bert", "gpt2", "llama", "bert-masked"):
        given = with_rank(bundle(name), 5)
        ids_BT = ids_of(given.tokenizer, CORPUS[0])
        wanted, before = outputs(given.model, ids_BT), num_bytes(given.model)
        METHOD.shrink(given, choice(rank=5), Calibration())
        assert torch.allclose(outputs(given.model, ids_BT), wanted, atol=1e-5), name
        assert num_bytes(given.model) < before


def test_a_tied_output_has_the_same_rows_and_another_does_not_change():
    given = bundle("gpt2")
    METHOD.shrink(given, choice(share=0.75), Calibration())
    model = given.model
    assert model.lm_head[1].weight is model.transformer.wte[0].weight
    assert torch.equal(model.lm_head[0].weight, model.transformer.wte[1].weight.t())
    masked = bundle("bert-masked").model
    METHOD.shrink(Bundle(masked), choice(), Calibration())
    assert masked.cls.predictions.decoder.bias is masked.cls.predictions.bias
    llama = bundle("llama")
    METHOD.shrink(llama, choice(), Calibration())
    assert type(llama.model.lm_head) is nn.Linear


def test_the_row_of_padding_stays():
    given = bundle("bert")
    METHOD.shrink(given, choice(), Calibration())
    assert given.model.get_input_embeddings().padding_idx == 0


def test_bad_input_is_refused_with_what_to_do():
    assert "train it with a smaller `model.embedding_size`" in METHOD.choices(bundle("lstm-lm"))
    assert "share the token embedding" in METHOD.choices(bundle("t5-whole"))
    given = bundle("gpt2")
    assert "give a smaller rank or share" in METHOD.refusal(given, choice(rank=32))
    METHOD.shrink(given, choice(), Calibration())
    assert "is a FactoredEmbedding" in METHOD.refusal(given, choice())
