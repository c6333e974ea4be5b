"""A smaller model, saved, loaded by every method, and trained."""

from __future__ import annotations

import json

import pytest
import torch

from model_folders import model_folder, tokenizer
from plimsoll.compression.methods import Bundle
from plimsoll.compression.saving import form_of, save_bundle
from plimsoll.errors import OutputError
from plimsoll.models.build import save_model
from plimsoll.models.hugging_face import TextShape, load_hugging_face
from plimsoll.models.loading import load_model, sketch_checkpoint
from plimsoll.models.recurrent.model import build_recurrent
from plimsoll.weights import structure

IDS_BT = torch.arange(14).reshape(2, 7)


def restructured(model):
    """Share the parameters of the last two layers of a model, and factor its embedding."""
    is_bert = model.config.model_type == "bert"
    layers, rows = ("bert.encoder.layer", "bert.embeddings.word_embeddings") if is_bert else ("h", "wte")
    layers, rows = (layers, rows) if is_bert else (f"transformer.{layers}", f"transformer.{rows}")
    for name in [rows, *([] if is_bert else ["lm_head"])]:
        structure.put(model, name, structure.factored(model.get_submodule(name), 4))
        structure.note(model, "factored", name, 4)
    if not is_bert:
        model.lm_head[1].weight = model.transformer.wte[0].weight
    structure.use_parameters_of(model.get_submodule(f"{layers}.1"), model.get_submodule(f"{layers}.2"))
    structure.note(model, "shared", f"{layers}.2", f"{layers}.1")
    return model.eval()


@pytest.fixture(params=["GPT2LMHeadModel", "BertForSequenceClassification"])
def folder(request, tmp_path):
    """Save a restructured model of three layers."""
    origin = model_folder(tmp_path / "origin", request.param, num_hidden_layers=3)
    model = restructured(load_model(origin).model)
    save_bundle(Bundle(model, tokenizer()), tmp_path / "small", origin)
    torch.save(model(IDS_BT).logits.detach(), tmp_path / "logits.pt")
    return tmp_path / "small"


def test_it_is_loaded_as_it_was_in_memory_and_from_its_files(folder):
    logits = torch.load(folder.parent / "logits.pt")
    own_bytes = (folder / "model.safetensors").stat().st_size
    for place in ("memory", "mapped"):
        loaded = load_model(folder, place=place)
        assert torch.equal(loaded.model(IDS_BT).logits, logits)
        assert not loaded.missing + loaded.unexpected
        assert loaded.num_bytes < own_bytes < loaded.num_bytes + 20_000
    skeleton, _ = sketch_checkpoint(folder)
    [pair] = skeleton.model.config.shrunk["shared"].items()
    one, other = (dict(skeleton.model.get_submodule(name).named_parameters()) for name in pair)
    assert all(value is other[name] for name, value in one.items())
    assert len(skeleton.weights) == len([*skeleton.model.parameters()])
    assert form_of(loaded.model) == "code"


def test_a_training_starts_from_it_and_what_it_saves_is_like_it(folder, tmp_path):
    is_bert = "Bert" in json.loads((folder / "config.json").read_text())["architectures"][0]
    shape = TextShape(94, 2 if is_bert else None, 2, 16)
    model = load_hugging_face(folder, shape, "cpu")
    labels = torch.tensor([0, 1]) if is_bert else IDS_BT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS_BT, labels=labels).loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    optimizer.step()
    save_model(model, tmp_path / "trained")
    trained = load_model(tmp_path / "trained")
    assert torch.equal(trained.model(IDS_BT).logits, model.eval()(IDS_BT).logits)
    assert not trained.missing + trained.unexpected
    sketch = load_hugging_face(folder, shape, "meta")
    assert [one.shape for one in sketch.parameters()] == [one.shape for one in model.parameters()]


def test_a_dry_run_builds_it_of_fake_tensors(folder):
    from torch._subclasses.fake_tensor import FakeTensorMode

    if "Bert" not in (folder / "config.json").read_text():
        pytest.skip("one of the two is enough: the classes are made alike")
    with FakeTensorMode():
        model = load_hugging_face(folder, TextShape(94, 2, 2, 16), "cpu")
    assert model.bert.embeddings.word_embeddings.rank == 4


def test_a_form_for_each_sort_of_model(tmp_path):
    plain = load_model(model_folder(tmp_path / "plain")).model
    assert form_of(plain) == "plain"
    fields = {"vocab_size": 20, "embedding_size": 8, "hidden_size": 8}
    recurrent = build_recurrent({"architecture": "lstm", **fields})
    assert form_of(recurrent) == "recurrent"
    plain.config.quantization_config = {"quant_method": "torchao"}
    assert form_of(plain) == "torchao"


def test_what_belongs_to_sentence_embeddings_comes_along(tmp_path):
    origin = model_folder(tmp_path / "origin", "BertModel")
    (origin / "1_Pooling").mkdir()
    (origin / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    (origin / "modules.json").write_text(json.dumps(modules))
    (origin / "sentence_bert_config.json").write_text("{}")
    save_bundle(Bundle(load_model(origin).model, tokenizer()), tmp_path / "small", origin)
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert {"modules.json", "1_Pooling", "sentence_bert_config.json", "tokenizer.json"} <= names


def test_nothing_is_overwritten(tmp_path):
    model = load_model(model_folder(tmp_path / "plain")).model
    with pytest.raises(OutputError, match="is not empty: give another --out"):
        save_bundle(Bundle(model), tmp_path / "plain")
