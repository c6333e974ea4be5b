"""A smaller vocabulary: the texts have the same tokens with bitwise equal logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.vocabulary import Vocabulary
from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice
from shrink_models import CORPUS, OTHER, bundle, calibration, ids_of, is_language_model, num_bytes, outputs

METHOD = Vocabulary()
CHOICE = Choice(technique="vocabulary")


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram", "WordLevel"])
def test_the_corpus_has_the_same_tokens_and_the_tokenizer_loads_again(kind, tmp_path):
    given = bundle("gpt2", kind)
    before = given.tokenizer
    METHOD.shrink(given, CHOICE, calibration(given))
    given.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(given.tokenizer) < len(before)
    for text in CORPUS:
        assert given.tokenizer.tokenize(text) == before.tokenize(text)
        numbers = given.tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == numbers
        assert loaded.convert_ids_to_tokens(numbers) == before.convert_ids_to_tokens(before(text)["input_ids"])
    for text in OTHER:
        assert max(given.tokenizer(text)["input_ids"]) < given.model.config.vocab_size
    assert given.tokenizer("zebra")["input_ids"]
    assert sorted(given.tokenizer.get_vocab().values()) == [*range(given.model.config.vocab_size)]
    assert [given.tokenizer.pad_token_id, given.tokenizer.unk_token_id] == [0, 1]


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "bert-masked", "roberta", "t5", "t5-whole", "lstm-classifier", "lstm-lm",
             "lstm-lm-tied", "lstm-tagger"]
)  # fmt: skip
def test_what_is_computed_of_the_corpus_has_the_same_bits(name):
    given = bundle(name)
    model, before = given.model, given.tokenizer
    wanted = [outputs(model, ids_of(before, text)) for text in CORPUS]
    total, rows = num_bytes(model), model.config.vocab_size
    METHOD.shrink(given, CHOICE, calibration(given))
    assert model.config.vocab_size == len(given.tokenizer) < rows
    assert num_bytes(model) < total
    places = [
        before.convert_tokens_to_ids(one)
        for one in given.tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    ]
    for text, logits in zip(CORPUS, wanted, strict=True):
        made = outputs(model, ids_of(given.tokenizer, text))
        assert torch.equal(made, logits[..., places] if logits.shape[-1] == rows else logits)
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings == len(places)]
    assert tables
    assert all(one.weight.shape[0] == len(places) for one in tables)


def test_what_is_rare_is_taken_away_when_asked_for():
    given = bundle("bert")
    seldom = Choice(technique="vocabulary", options={"min_count": 3})
    plain = bundle("bert")
    METHOD.shrink(plain, CHOICE, calibration(plain))
    METHOD.shrink(given, seldom, calibration(given))
    assert 256 < len(given.tokenizer) < len(plain.tokenizer)  # all bytes stay in the vocabulary


def test_ties_stay_and_numbers_in_the_configuration_follow(tmp_path):
    given = bundle("gpt2")
    given.model.config.eos_token_id = given.model.generation_config.eos_token_id = [0, 3]
    last = len(given.tokenizer) - 2
    given.model.config.bos_token_id = last
    METHOD.shrink(given, CHOICE, Calibration(token_counts=np.eye(1, len(given.tokenizer), 5, dtype=np.int64)[0]))
    model = given.model
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.out_features == model.config.vocab_size == len(given.tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [0, 3]
    kept = given.tokenizer.convert_ids_to_tokens(model.config.bos_token_id)
    assert kept == bundle("gpt2").tokenizer.convert_ids_to_tokens(last)


def test_rows_beyond_the_tokenizer_go_first():
    given = bundle("bert")
    given.model.resize_token_embeddings(len(given.tokenizer) + 40)
    total = num_bytes(given.model)
    METHOD.shrink(given, CHOICE, Calibration())  # without counts, only tokens that no text can contain are removed
    assert given.model.config.vocab_size == len(given.tokenizer)
    assert num_bytes(given.model) == total - 40 * 32 * 4


def test_a_model_trains_on():
    given = bundle("gpt2")
    METHOD.shrink(given, CHOICE, calibration(given))
    [batch, *_] = calibration(given).batches()
    given.model(**batch).loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in given.model.parameters())
    assert is_language_model(given.model)


def test_bad_input_is_refused_with_what_to_do():
    given = bundle("gpt2")
    no_tokenizer = METHOD.refusal(Bundle(given.model), CHOICE)
    assert "give a model folder that has its tokenizer.json" in no_tokenizer
    assert METHOD.choices(Bundle(given.model)) == no_tokenizer
    assert METHOD.choices(given) == (CHOICE,)
    wrong = Choice(technique="vocabulary", options={"min_count": 0})
    assert "give a whole number of at least 1" in METHOD.refusal(given, wrong)
    assert "no option `share`" in METHOD.refusal(given, Choice(technique="vocabulary", options={"share": 0.5}))
    assert "no `vocab_size`" in METHOD.refusal(Bundle(nn.Linear(2, 2), given.tokenizer), CHOICE)
    with pytest.raises(WeightsError, match="use the tokenizer in the model's folder"):
        METHOD.shrink(given, CHOICE, Calibration(token_counts=np.ones(5000, dtype=np.int64)))


def test_an_adaptive_softmax_is_refused():
    from plimsoll.models.recurrent.model import build_recurrent

    fields = {"vocab_size": 300, "embedding_size": 8, "hidden_size": 8, "adaptive_cutoffs": (50,)}
    model = build_recurrent({"architecture": "lstm", **fields})
    assert "frequency ranks" in METHOD.refusal(Bundle(model, bundle("lstm-lm").tokenizer), CHOICE)


def test_needs_the_corpus():
    assert METHOD.needs(CHOICE) == {"corpus"}
    assert json.dumps(METHOD.saves)
