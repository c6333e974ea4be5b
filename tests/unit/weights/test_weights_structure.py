"""Models built from the field ``shrunk`` of a configuration: their outputs, saving, and loading without Plimsoll."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from plimsoll.models.loading import read_config
from plimsoll.weights import structure
from plimsoll.weights.structure import note, restructure, shrunk_class, unmarked

IDS_BT = torch.arange(14).reshape(2, 7)


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=64, **ends)).eval()


def factor(model: nn.Module, name: str, rank: int) -> None:
    made = structure.factored(model.get_submodule(name), rank)
    structure.put(model, name, made)
    note(model, "factored", name, rank)


def share(model: nn.Module, name: str, source: str) -> None:
    structure.use_parameters_of(model.get_submodule(source), model.get_submodule(name))
    note(model, "shared", name, source)


def half_of_the_heads(model: BertForSequenceClassification) -> None:
    """Keep two of the four heads of the first layer, which BERT's configuration cannot express."""
    name, kept = "bert.encoder.layer.0.attention", torch.arange(8)
    attention = model.get_submodule(name)
    for part in ("query", "key", "value"):
        structure.keep(getattr(attention.self, part), outputs=kept)
        note(model, "resized", f"{name}.self.{part}", [16, 8])
    structure.keep(attention.output.dense, inputs=kept)
    note(model, "resized", f"{name}.output.dense", [8, 16])
    attention.self.num_attention_heads, attention.self.all_head_size = 2, 8
    note(model, "attributes", f"{name}.self", {"num_attention_heads": 2})
    note(model, "attributes", f"{name}.self", {"all_head_size": 8})


def changed_bert() -> BertForSequenceClassification:
    model = bert()
    half_of_the_heads(model)
    factor(model, "bert.encoder.layer.0.output.dense", 3)
    factor(model, "bert.embeddings.word_embeddings", 3)
    share(model, "bert.encoder.layer.2", "bert.encoder.layer.1")
    return model.eval()


def changed_gpt2() -> GPT2LMHeadModel:
    model = gpt2()
    name = "transformer.h.0.attn.c_attn"
    structure.put(model, name, structure.as_linear(model.get_submodule(name)))
    note(model, "as_linear", name)
    factor(model, "transformer.h.0.mlp.c_fc", 3)
    factor(model, "transformer.wte", 4)
    factor(model, "lm_head", 4)
    model.lm_head[1].weight = model.transformer.wte[0].weight
    share(model, "transformer.h.2", "transformer.h.1")
    return model.eval()


@pytest.mark.parametrize("make", [changed_bert, changed_gpt2])
def test_what_is_noted_is_built_and_loaded_with_the_same_outputs(make, tmp_path):
    model = make()
    before = model(IDS_BT, output_hidden_states=True)
    assert len(before.hidden_states) == 4  # transformers determines the recorded outputs by the class
    assert type(model).__name__ == type(model).__mro__[2].__name__
    model.save_pretrained(tmp_path)
    loaded = shrunk_class(type(model).__mro__[2]).from_pretrained(tmp_path, config=read_config(tmp_path)).eval()
    assert torch.equal(loaded(IDS_BT).logits, before.logits)
    assert loaded.config.shrunk == model.config.shrunk
    names = [{id(p): n for n, p in one.named_parameters()}.values() for one in (loaded, model)]
    assert [*names[0]] == [*names[1]]  # shared parameters are one parameter again
    copied = copy.deepcopy(loaded)
    assert torch.equal(copied(IDS_BT).logits, before.logits)


@pytest.mark.parametrize("make", [changed_bert, changed_gpt2])
def test_on_the_meta_device_the_shapes_are_made(make):
    model = make()
    with torch.device("meta"):
        sketch = shrunk_class(type(model))(copy.deepcopy(model.config))
    wanted = [(name, value.shape) for name, value in model.named_parameters()]
    assert [(name, value.shape) for name, value in sketch.named_parameters()] == wanted
    assert all(value.is_meta for value in sketch.parameters())


_WITHOUT_PLIMSOLL = """
import sys
sys.modules["plimsoll"] = None  # an import of it fails
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging
logging.set_verbosity_error(); logging.disable_progress_bar()

for name, auto in (("bert", AutoModelForSequenceClassification), ("gpt2", AutoModelForCausalLM)):
    folder = f"{sys.argv[1]}/{name}"
    ids, logits = torch.load(f"{folder}/outputs.pt")
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(model(ids).logits, logits), name
    model.save_pretrained(f"{folder}/again")
    again = auto.from_pretrained(f"{folder}/again", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, logits), name
    bare = AutoModel.from_pretrained(f"{folder}/again", trust_remote_code=True).eval()
    whole = again(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(bare(ids)[0], whole), name
    if name == "gpt2":
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        cached, plain = (again.generate(ids, use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, plain)
print("the same")
"""


@pytest.mark.long
def test_it_is_loaded_and_saved_again_without_plimsoll(tmp_path):
    for name, make in (("bert", changed_bert), ("gpt2", changed_gpt2)):
        model = make()
        model.save_pretrained(tmp_path / name)
        torch.save((IDS_BT, model(IDS_BT).logits.detach()), tmp_path / name / "outputs.pt")
    command = [sys.executable, "-I", "-c", _WITHOUT_PLIMSOLL, str(tmp_path)]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.stdout.strip() == "the same", done.stderr[-2000:]


@pytest.mark.parametrize("make", [changed_bert, changed_gpt2])
def test_without_the_code_of_the_folder_no_class_of_transformers_takes_it(make, tmp_path):
    """Without the code of the folder, loading by any class of transformers fails with advice.

    Otherwise the class would initialize missing weights with random values.
    """
    model = make()
    plain_class = type(model).__mro__[2]
    model.save_pretrained(tmp_path)
    for load in (AutoConfig, AutoModel, plain_class, plain_class.config_class):
        with pytest.raises((ValueError, StrictDataclassError), match="trust_remote_code=True"):
            load.from_pretrained(tmp_path)


def test_a_folder_of_before_it_had_a_type_of_its_own_is_read(tmp_path):
    model = changed_bert()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "shrunk-bert"
    (tmp_path / "config.json").write_text(json.dumps(unmarked(fields)))
    assert type(read_config(tmp_path)) is BertConfig
    assert read_config(tmp_path).shrunk == model.config.shrunk


def test_names_are_found_with_another_head_and_without_one(tmp_path):
    changed_bert().save_pretrained(tmp_path)
    bare = shrunk_class(BertModel).from_pretrained(tmp_path, config=read_config(tmp_path))
    assert bare.encoder.layer[0].attention.self.query.out_features == 8
    bare.save_pretrained(tmp_path / "bare")
    folder, config = tmp_path / "bare", read_config(tmp_path / "bare")
    again = shrunk_class(BertForSequenceClassification).from_pretrained(folder, config=config)
    assert again.bert.encoder.layer[0].output.dense.rank == 3
    masked = shrunk_class(BertForMaskedLM).from_pretrained(folder, config=read_config(folder))
    # The embedding is factored and the output is not, so they cannot be tied any more.
    assert "cls.predictions.decoder.weight" not in masked.all_tied_weights_keys
    masked.save_pretrained(tmp_path / "masked")


def test_a_new_model_has_new_weights_of_the_architecture():
    torch.manual_seed(0)
    model = shrunk_class(BertForSequenceClassification)(changed_bert().config)
    factors = model.bert.encoder.layer[0].output.dense
    assert 0.01 < float(factors[0].weight.detach().std()) < 0.03
    assert torch.equal(factors.bias, torch.zeros(16))
    loss = model(IDS_BT, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


def test_factors_say_what_they_stand_for():
    model = changed_gpt2()
    linear, rows = model.lm_head, model.transformer.wte
    assert (linear.in_features, linear.rank, linear.out_features) == (16, 4, 50)
    assert (rows.num_embeddings, rows.rank, rows.embedding_dim) == (50, 4, 16)
    assert torch.allclose(rows.weight[3], rows(torch.tensor(3)), atol=1e-6)
    hidden = torch.randn(2, 16)
    assert torch.allclose(linear(hidden), hidden @ linear.weight.t(), atol=1e-6)
    assert linear.bias is None
    rows.padding_idx = 0
    assert rows[0].padding_idx == rows.padding_idx == 0


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 1]])
def test_parts_that_are_kept_keep_their_values(kept):
    from transformers.pytorch_utils import Conv1D

    some = torch.tensor(kept)
    linear, conv, rows, norm = nn.Linear(4, 5), Conv1D(5, 4), nn.Embedding(6, 4), nn.LayerNorm(5)
    for module in (linear, conv, rows, norm):
        values = [one.detach().clone() for one in module.parameters()]
        if isinstance(module, nn.LayerNorm):
            structure.keep(module, outputs=some)
            assert module.normalized_shape == (len(kept),)
        elif isinstance(module, nn.Embedding):
            structure.keep(module, inputs=some)
            assert torch.equal(module(torch.tensor(1)), values[0][kept[1]])
        else:
            weight = values[0].t() if isinstance(module, Conv1D) else values[0]
            structure.keep(module, inputs=some, outputs=some)
            wanted = nn.functional.linear(torch.ones(len(kept)), weight[some][:, some], values[1][some])
            assert torch.allclose(module(torch.ones(1, len(kept)))[0], wanted)
        assert structure.sizes_of(module)[-1] == (4 if module is rows else len(kept))


def test_sizes_that_are_null_stay():
    module = nn.Linear(4, 5)
    structure.set_sizes(module, [3, None])
    assert module.weight.shape == (5, 3)
    assert module.in_features == 3
    norm = nn.LayerNorm(5)
    structure.set_sizes(norm, [2])
    assert norm(torch.randn(1, 2)).shape == (1, 2)


def test_llama_has_norms_and_layers_of_other_kinds():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
    restructure(model, {"resized": {"model.layers.0.mlp.up_proj": [16, 8], "model.norm": [8]}})
    assert model.model.norm.weight.shape == (8,)
    assert model.model.layers[0].mlp.up_proj.out_features == 8


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match=r"has \['cut'\]"):
        restructure(bert(), {"cut": {}})
    with pytest.raises(AttributeError, match="has no model `Nothing`"):
        structure.Nothing


def test_the_copied_file_needs_nothing_of_ours():
    text = Path(structure.__file__).read_text(encoding="utf-8")
    assert "import plimsoll" not in text
    assert "from plimsoll" not in text
