"""A language model in two parts: the head over some positions gives the logits of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distillations import LENGTH, VOCABULARY, batch_of, model_of
from plimsoll.models.head_apart import forward_of, head_apart


@pytest.mark.parametrize("kind", ["gpt2", "lstm"])
def test_the_head_of_some_positions_gives_their_logits(kind: str) -> None:
    model, batch = model_of(kind, 0).eval(), batch_of(kind)
    del batch["labels"]
    parts, first = head_apart(model, batch, num_first=2)
    whole = model(**batch).logits
    torch.testing.assert_close(parts.head(parts.hidden_BTH[:, 3:7]), whole[:, 3:7])
    assert (parts.num_outputs, first is None) == (VOCABULARY, kind == "lstm")
    if first is not None:
        torch.testing.assert_close(first, whole[:, :2])
    assert parts.matrix is not None
    assert any(one is parts.matrix.weight for one in parts.parameters)  # tied, in GPT-2, and of the head all the same


def test_parts_of_the_body_are_not_of_the_head() -> None:
    model = model_of("gpt2", 0)
    parts, _ = head_apart(model, {"input_ids": batch_of("gpt2")["input_ids"]})
    assert [name for name, one in model.named_parameters() if any(one is it for it in parts.parameters)] == [
        "transformer.wte.weight"
    ]


def test_a_model_of_ones_own_has_whole_logits_and_no_head() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("gpt2", 0)

        def forward(self, input_ids: torch.Tensor) -> object:
            return self.inner(input_ids=input_ids)

    model, ids = Plain().eval(), batch_of("gpt2")["input_ids"]
    parts, first = head_apart(model, {"input_ids": ids})
    assert (first, parts.parameters, parts.matrix) == (None, (), None)
    torch.testing.assert_close(parts.head(parts.hidden_BTH[:, 2:4]), model(ids).logits[:, 2:4])


def test_what_the_layers_pass_on_is_kept_where_it_is_asked_for() -> None:
    model, batch = model_of("gpt2", 0, layers=3).eval(), batch_of("gpt2")
    del batch["labels"]
    assert head_apart(model, batch)[0].states == ()
    states = head_apart(model, batch, with_states=True)[0].states
    assert [tuple(one.shape[1:]) for one in states] == [(LENGTH, 16)] * 4
    for own, expected in zip(states, model(**batch, output_hidden_states=True).hidden_states, strict=True):
        torch.testing.assert_close(own, expected)


def test_a_forward_is_put_back_also_one_that_was_there() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), forward_of(layer, lambda run, one: 1 / 0):
        layer(torch.ones(1, 2))
    assert "forward" not in vars(layer)
    layer.forward = own = layer.forward  # type: ignore[method-assign]
    with forward_of(layer, lambda run, one: run(one) + 1):
        torch.testing.assert_close(layer(torch.ones(1, 2)), own(torch.ones(1, 2)) + 1)
    assert layer.forward is own
