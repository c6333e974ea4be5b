"""Removal of attention heads: dead heads without loss, and a note if the configuration cannot express the result."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from plimsoll.compression.attention import attentions_of
from plimsoll.compression.changed_config import input_dim
from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.heads import Heads
from plimsoll.records.plan import Choice
from pruned_models import ARCHITECTURES, batches_of, logits_of, num_weights, shapes_of, small_model

HEADS = Heads()
PLAIN = {"llama", "qwen2", "mistral", "gemma", "phi", "phi3"}


def chosen(**options: float | str) -> Choice:
    return Choice(technique="heads", options=options)


def kill_first_group(model: nn.Module) -> None:
    """Zero the weights that read the first head, or the heads that share the first keys and values."""
    for attention in attentions_of(model):
        reader = model.get_submodule(attention.reader)
        rows = reader.weight.data if input_dim(reader) == 0 else reader.weight.data.T
        rows[: attention.heads_per_group * attention.head_width] = 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("importance", ["magnitude", "taylor", "activation"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dead_heads_leave_without_a_trace(name: str, importance: str):
    model = small_model(name)
    kill_first_group(model)
    before, num_before, bundle = logits_of(model), num_weights(model), Bundle(model)
    num_groups = attentions_of(model)[0].num_groups
    choice = chosen(share=1 / num_groups, importance=importance)
    HEADS.shrink(bundle, choice, Calibration(lambda: batches_of(model)))
    torch.testing.assert_close(logits_of(bundle.model), before, rtol=0, atol=1e-6)
    assert num_weights(bundle.model) < num_before
    assert {one.num_groups for one in attentions_of(bundle.model)} == {num_groups - 1}
    assert (getattr(model.config, "shrunk", None) is None) == (name in PLAIN)
    on_meta = Bundle(small_model(name, "meta"))
    HEADS.shrink(on_meta, choice, Calibration())
    assert shapes_of(on_meta.model) == shapes_of(bundle.model)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_heads_leave_twice_and_the_rest_is_trained(name: str):
    model = small_model(name, **({"num_key_value_heads": 4} if name == "llama" else {}))
    for num_heads in (3, 2):
        HEADS.shrink(Bundle(model), chosen(), Calibration())
        assert [one.num_heads for one in attentions_of(model)] == [num_heads, num_heads]
        model(**next(batches_of(model))).loss.backward()
        assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)
        model.zero_grad(set_to_none=True)


def test_a_head_is_kept_for_its_values_and_what_reads_them():
    model = small_model("bert")
    part = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for layer in (part.self.query, part.self.key, part.self.value):
            layer.weight.copy_(torch.arange(4.0).repeat_interleave(4)[:, None].expand(16, 16))  # head 0 has only zeros
            layer.bias.zero_()
        part.output.dense.weight.fill_(1.0)
        part.output.dense.weight[:, 12:] = 0.0  # no output depends on head 3
    HEADS.shrink(Bundle(model), chosen(share=0.5), Calibration())
    assert part.self.value.weight[:, 0].tolist() == [1.0] * 4 + [2.0] * 4
    assert part.self.query.weight.shape == (8, 16)
    assert model.config.shrunk["attributes"]["bert.encoder.layer.0.attention.self"] == {
        "num_attention_heads": 2, "all_head_size": 8,
    }  # fmt: skip
    assert model.config.num_attention_heads == 4, "the configuration of BERT cannot say two heads of a width of 4"


def test_the_configuration_of_grouped_heads_says_how_many_are_left():
    model = small_model("qwen2")
    HEADS.shrink(Bundle(model), chosen(share=0.5), Calibration())
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 4)
    ids = next(batches_of(model))["input_ids"][:, :4]
    with_cache, without = (
        model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_it_offers_what_leaves_whole_groups():
    assert [str(choice) for choice in HEADS.choices(Bundle(small_model("bert", "meta")))] == ["heads=0.25", "heads=0.5"]
    assert [str(choice) for choice in HEADS.choices(Bundle(small_model("llama", "meta")))] == ["heads=0.5"]


def test_what_cannot_be_is_refused_with_what_was_looked_for():
    assert "Linear has no attention: looked for linear layers named query, q_proj" in HEADS.choices(
        Bundle(nn.Linear(1, 1))
    )
    said = HEADS.refusal(Bundle(small_model("llama", "meta")), chosen(share=0.1))
    assert (
        "a share of 0.1 of 2 groups of heads that share keys and values is none of them: give a share from 0.5" in said
    )
    said = HEADS.refusal(Bundle(small_model("bert", "meta")), chosen(share=0.95))
    assert "a share of 0.95 of 4 heads is all of them: give a share from 0.25 to 0.75" in said
    shared = small_model("bert", "meta")
    shared.config.shrunk = {"shared": {"bert.encoder.layer.1": "bert.encoder.layer.0"}}
    assert "2 layers of BertForSequenceClassification share their weights: use heads before" in HEADS.choices(
        Bundle(shared)
    )
    with torch.device("meta"):
        config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=40)
        slopes = transformers.BloomForCausalLM(config)
    assert "number of heads: num_heads of `transformer` would become" in HEADS.choices(Bundle(slopes))
