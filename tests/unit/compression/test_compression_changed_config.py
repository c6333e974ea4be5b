"""A model cut to another configuration, or an error that gives the reason against it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.compression.changed_config import block_of, checked, cuts_of, other_numbers, take_fields, twin_of
from plimsoll.errors import WeightsError
from pruned_models import small_model


def test_the_configuration_tells_what_must_be_cut():
    model = small_model("bert")
    twin = twin_of(model, {"intermediate_size": 20})
    assert all(parameter.is_meta for parameter in twin.parameters())
    first = [cut for cut in cuts_of(model, twin) if "layer.0" in cut.name]
    assert [(cut.name.removeprefix("bert.encoder.layer.0."), *cut[1:]) for cut in first] == [
        ("intermediate.dense.weight", 0, 24, 20),
        ("intermediate.dense.bias", 0, 24, 20),
        ("output.dense.weight", 1, 24, 20),
    ]
    assert first[0].module == "bert.encoder.layer.0.intermediate.dense"
    assert model.config.intermediate_size == 24, "nothing is changed yet"


def test_what_cannot_be_cut_is_said():
    model = small_model("bert")
    assert "which is not smaller" in cuts_of(model, twin_of(model, {"intermediate_size": 25}))
    assert "other parameters, such as `bert.encoder.layer.1." in cuts_of(
        model, twin_of(model, {"num_hidden_layers": 1})
    )
    assert "BertForSequenceClassification cannot be built with hidden_size 15: " in twin_of(model, {"hidden_size": 15})
    assert "Linear has no configuration" in twin_of(nn.Linear(1, 1), {})
    with pytest.raises(WeightsError, match="it is so; use a choice that `plimsoll shrink` offers"):
        checked("it is so")


def test_numbers_that_modules_keep_differ_where_sizes_do():
    model = small_model("gpt2", n_inner=24)
    twin = twin_of(model, {"n_inner": 20})
    assert sorted(set(other_numbers(model, twin)))[0] == ("transformer.h.0.mlp.c_fc", "nf", 20)


def test_configurations_of_parts_are_changed_too():
    import transformers

    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 12, "num_layers": 1, "vocab_size": 40}
    with torch.device("meta"):
        model = transformers.T5Model(transformers.T5Config(**sizes))
    assert model.encoder.config is not model.config
    take_fields(model, {"d_ff": 6})
    assert {model.config.d_ff, model.encoder.config.d_ff, model.decoder.config.d_ff} == {6}


@pytest.mark.parametrize(
    ("name", "block"), [("h.1.mlp.0.weight", "h.1"), ("head.weight", "head.weight"), ("a.b.10.c", "a.b.10")]
)
def test_a_block_is_the_outermost_numbered_module(name: str, block: str):
    assert block_of(name) == block
