"""A smaller hidden size: the same dimensions are removed everywhere, as whole heads if necessary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.heads import Heads
from plimsoll.compression.methods.hidden import Hidden
from plimsoll.records.plan import Choice
from pruned_models import ARCHITECTURES, batches_of, logits_of, shapes_of, small_model

HIDDEN = Hidden()
KEEP_HEADS = {"llama", "qwen2", "mistral", "gemma", "phi", "phi3"}


def chosen(**options: float | str) -> Choice:
    return Choice(technique="hidden", options=options)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_left_is_a_model_of_its_class(name: str):
    model = small_model(name)
    HIDDEN.shrink(Bundle(model), chosen(share=0.25), Calibration())
    assert model.config.hidden_size == 12
    assert model.config.num_attention_heads == (4 if name in KEEP_HEADS else 3)
    assert getattr(model.config, "shrunk", None) is None
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    assert {one.embedding_dim for one in tables} == ({8, 12} if name == "electra" else {12}) - (
        {12} if name == "electra" else set()
    )
    model(**next(batches_of(model))).loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)
    on_meta = Bundle(small_model(name, "meta"))
    HIDDEN.shrink(on_meta, chosen(share=0.25), Calibration())
    assert shapes_of(on_meta.model) == shapes_of(model)


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "activation"])
def test_dead_dimensions_are_the_ones_that_leave(importance: str):
    """The dead dimensions are removed.

    Norms then average over three quarters of the numbers, so the test scales their weights back.
    """
    model = small_model("llama", rms_norm_eps=1e-12)
    dead = [0, 3, 7, 14]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, dead] = 0
        for block in model.model.layers:
            block.self_attn.o_proj.weight[dead] = 0
            block.mlp.down_proj.weight[dead] = 0
            for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                layer.weight[:, dead] = 0
            block.mlp.gate_proj.weight[:, dead] = 0
            block.mlp.up_proj.weight[:, dead] = 0
    before = logits_of(model)
    HIDDEN.shrink(Bundle(model), chosen(share=0.25, importance=importance), Calibration(lambda: batches_of(model)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight *= (16 / 12) ** 0.5
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"


def test_whole_heads_leave_where_their_width_is_not_in_the_configuration():
    model = small_model("gpt2")
    last = model.transformer.h[1].attn
    with torch.no_grad():
        last.c_proj.weight[4:8] = 0.0  # no output depends on head 1 of the last block
    values = last.c_attn.weight.clone()
    HIDDEN.shrink(Bundle(model), chosen(share=0.25), Calibration())
    assert (last.num_heads, last.head_dim, last.split_size, last.embed_dim) == (3, 4, 12, 12)
    assert model.config.n_inner == 64, "what was four times the hidden size stays"
    kept = [row for row in range(16) if not 4 <= row < 8]
    dimensions = [values[:, 0].tolist().index(one) for one in last.c_attn.weight[:, 0].tolist()]
    torch.testing.assert_close(last.c_attn.weight[:, :12], values[dimensions][:, kept], rtol=0, atol=0)


def test_shares_that_are_no_whole_heads_are_refused_with_those_that_are():
    said = HIDDEN.refusal(Bundle(small_model("bert", "meta")), chosen(share=0.3))
    assert said == (
        "a share of 0.3 of 16 dimensions does not leave whole heads of 4; BertForSequenceClassification has 4: "
        "give one of 0.25, 0.5, 0.75"
    )


def test_where_heads_stay_the_width_is_a_multiple_of_their_number():
    """If heads stay, the width is a multiple of their number, as the configuration of Llama requires."""
    model = small_model("llama")
    HIDDEN.shrink(Bundle(model), chosen(share=0.3), Calibration())
    assert (model.config.hidden_size, model.config.head_dim) == (12, 4)
    said = HIDDEN.refusal(Bundle(model), chosen(share=0.1))
    assert said == "a share of 0.1 of 3 blocks of 4 dimensions is none of them: give a share from 0.333 to 0.667"


def test_it_offers_what_can_be():
    assert [str(choice) for choice in HIDDEN.choices(Bundle(small_model("bert", "meta")))] == [
        "hidden(share=0.25,importance=activation)",
        "hidden(share=0.5,importance=activation)",
    ]
    offered = HIDDEN.choices(Bundle(small_model("llama", "meta", hidden_size=32)))
    assert [choice.options["share"] for choice in offered] == [0.125, 0.25, 0.5]


def test_what_cannot_be_is_refused():
    assert "Linear has no hidden size between blocks: looked for hidden_size" in HIDDEN.choices(Bundle(nn.Linear(1, 1)))
    bundle = Bundle(small_model("bert", "meta"))
    Heads().shrink(bundle, Choice(technique="heads"), Calibration())
    assert "whose sizes are independent of its hidden size: use hidden before other methods" in HIDDEN.choices(bundle)
