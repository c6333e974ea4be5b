"""An output layer that shares the weight of the embedding."""

from __future__ import annotations

import torch

from plimsoll.compression.methods import Calibration
from plimsoll.compression.methods.low_rank import LowRank
from plimsoll.compression.methods.tied import Tied
from plimsoll.compression.saving import form_of
from plimsoll.models.build import save_model
from plimsoll.models.loading import load_model
from plimsoll.records.plan import Choice
from shrink_models import CORPUS, bundle, ids_of, num_bytes, outputs

METHOD = Tied()
CHOICE = Choice(technique="tied")


def test_equal_tables_lose_nothing_and_are_saved_once():
    for name in ("llama", "lstm-lm"):
        given = bundle(name)
        table, output = (
            (given.model.embedding, given.model.head)
            if name == "lstm-lm"
            else (given.model.get_input_embeddings(), given.model.get_output_embeddings())
        )
        output.weight.data.copy_(table.weight)
        ids_BT = ids_of(given.tokenizer, CORPUS[0])
        wanted, before = outputs(given.model, ids_BT), num_bytes(given.model)
        METHOD.shrink(given, CHOICE, Calibration())
        assert output.weight is table.weight
        assert torch.equal(outputs(given.model, ids_BT), wanted)
        assert num_bytes(given.model) == before - table.weight.numel() * 4
        assert "already tied to its embedding" in METHOD.choices(given)


def test_a_model_of_another_structure_is_tied_as_well(tmp_path):
    given = bundle("llama")
    LowRank().shrink(given, Choice(technique="low_rank", options={"aware": False}), Calibration())
    METHOD.shrink(given, CHOICE, Calibration())
    assert form_of(given.model) == "code"
    save_model(given.model, tmp_path / "small")
    loaded = load_model(tmp_path / "small").model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_bad_input_is_refused_with_what_to_do():
    assert "no embedding and output to tie" in METHOD.choices(bundle("bert"))
    assert "no embedding and output to tie" in METHOD.choices(bundle("lstm-classifier"))
    assert "already tied to its embedding" in METHOD.choices(bundle("gpt2"))
    given = bundle("lstm-lm")
    given.model.head = torch.nn.Linear(12, given.model.config.vocab_size)
    assert "use `hidden` or `low_rank_embeddings`" in METHOD.choices(given)
