"""The query, key and value layers of each architecture, and the rows of each head."""

from __future__ import annotations

import pytest
import torch
import transformers

from plimsoll.compression.attention import Attention, attentions_of
from pruned_models import ARCHITECTURES, small_model

ODD = Attention("a", {}, "a.o", num_groups=2, heads_per_group=2, head_width=1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_block_has_one(name: str):
    found = attentions_of(small_model(name, "meta"))
    assert len(found) == 2
    groups = 2 if name in {"llama", "qwen2", "mistral", "gemma", "phi3"} else 4
    assert {(one.num_heads, one.num_groups, one.head_width) for one in found} == {(4, groups, 4)}


@pytest.mark.parametrize(
    ("role", "rows"), [("query", [2, 3]), ("reader", [2, 3]), ("key", [1]), ("value", [1]), ("joined", [2, 3, 5, 7])]
)
def test_the_rows_of_a_group(role: str, rows: list[int]):
    """A group has the rows of its heads.

    Four query heads of one feature form two groups, and the joined rows are q0 q1 q2 q3 k0 k1 v0 v1.
    """
    assert ODD.rows(role, torch.tensor([1])).tolist() == rows


def test_the_rows_of_heads_that_lie_together():
    """The rows of interleaved heads are found.

    The order is q0 k0 v0 q1 k1 v1, with two features each.
    """
    neox = Attention("a", {"by head": "a.query_key_value"}, "a.dense", num_groups=2, heads_per_group=1, head_width=2)
    assert neox.rows("by head", torch.tensor([1])).tolist() == [6, 7, 8, 9, 10, 11]
    assert neox.value_rows()[1].tolist() == [4, 5, 10, 11]
    joined = Attention("a", {"joined": "a.c_attn"}, "a.c_proj", num_groups=2, heads_per_group=2, head_width=1)
    assert joined.value_rows()[1].tolist() == [6, 7]


def test_a_layout_that_is_not_known_is_not_guessed():
    with torch.device("meta"):
        config = transformers.FalconConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=40, multi_query=True
        )
        model = transformers.FalconForCausalLM(config)
    assert "4 heads of 4 in 4 groups need 48: its layout is unknown, leave this out" in attentions_of(model)
    with torch.device("meta"):
        t5 = transformers.T5Model(transformers.T5Config(d_model=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=40))
    assert "T5Model is an encoder-decoder, whose heads are not supported" in attentions_of(t5)
