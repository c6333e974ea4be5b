"""Log-probabilities of tokens equal the result of all logits, for every head, with few logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from plimsoll.models.recurrent.model import RecurrentLanguageModel, recurrent_config
from plimsoll.models.token_scores import token_log_probabilities

VOCABULARY, LENGTH, TEXTS = 60, 11, 3

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The heads differ from a plain matrix by: nothing; a projection in the body; a transform before the head; a soft cap;
# a scale; a bias; experts; a body that cannot be separated (llama4), or whose output cannot be cut (prophetnet).
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "bert": {"is_decoder": True},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {},
    "granite": {"logits_scaling": 3.0},
    "gptj": {"rotary_dim": 4},
    "phi": {},
    "mixtral": {"num_local_experts": 4},
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    "llama4_text": {"num_local_experts": 4, "moe_layers": []},
    "prophetnet": {"num_decoder_layers": 2, "num_decoder_attention_heads": 4, "is_decoder": True},
}


def hugging_face(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    fields = SIZES | FAMILIES[family]
    if family == "prophetnet":  # which has other names for it, and refuses this one
        del fields["num_hidden_layers"]
    config = CONFIG_MAPPING[family](**fields)
    return AutoModelForCausalLM.from_config(config).eval()


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def from_whole_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits.float()
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -losses.view(ids[:, 1:].shape).masked_fill(mask[:, 1:] == 0, 0)


@pytest.mark.parametrize("chunk_positions", [1, 4, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_whole_logits(family: str, chunk_positions: int) -> None:
    model, (ids, mask) = hugging_face(family), texts()
    with torch.inference_mode():
        found = token_log_probabilities(model, ids, mask, chunk_positions * TEXTS * VOCABULARY)
        torch.testing.assert_close(found, from_whole_logits(model, ids, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"adaptive_cutoffs": (10, 30)}], ids=["linear", "adaptive"])
@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
def test_scores_of_a_recurrent_model_are_those_of_its_whole_logits(architecture: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"architecture": architecture, "vocab_size": VOCABULARY, "embedding_size": 16, "hidden_size": 16}
    model = RecurrentLanguageModel(recurrent_config(sizes | fields)).eval()
    ids, mask = texts()
    with torch.inference_mode():
        found = token_log_probabilities(model, ids, mask, 4 * TEXTS * VOCABULARY)
        torch.testing.assert_close(found, from_whole_logits(model, ids, mask), rtol=1e-6, atol=1e-6)


def test_no_more_logits_are_made_than_were_asked_for() -> None:
    model, (ids, mask) = hugging_face("gpt2"), texts()
    with torch.inference_mode(), heads_called(model) as shapes:
        token_log_probabilities(model, ids, mask, 4 * TEXTS * VOCABULARY)
    assert shapes == [(TEXTS, 4, VOCABULARY), (TEXTS, 4, VOCABULARY), (TEXTS, 2, VOCABULARY)]


def test_the_body_runs_once_and_is_as_it_was() -> None:
    model, (ids, mask) = hugging_face("gpt2"), texts()
    calls: list[None] = []
    with model.transformer.h[0].register_forward_hook(lambda *_: calls.append(None)), torch.inference_mode():
        token_log_probabilities(model, ids, mask, TEXTS * VOCABULARY)
    assert len(calls) == 1
    assert "forward" not in vars(model.transformer)


def test_a_body_whose_forward_was_replaced_keeps_its_replacement() -> None:
    model, (ids, mask) = hugging_face("gpt2"), texts()
    run = model.transformer.forward
    model.transformer.forward = replacement = lambda *arguments, **named: run(*arguments, **named)
    with torch.inference_mode():
        token_log_probabilities(model, ids, mask, TEXTS * VOCABULARY)
    assert model.transformer.forward is replacement


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_of_one_token_has_no_prediction(length: int) -> None:
    ids = torch.ones((2, length), dtype=torch.long)
    assert token_log_probabilities(hugging_face("gpt2"), ids, torch.ones_like(ids)).shape == (2, 0)


def test_half_precision_is_reduced_in_float32() -> None:
    model, (ids, mask) = hugging_face("llama").to(torch.bfloat16), texts()
    with torch.inference_mode():
        found = token_log_probabilities(model, ids, mask)
        torch.testing.assert_close(found, from_whole_logits(model, ids, mask), rtol=0, atol=0)
    assert found.dtype == torch.float32


def test_it_is_traced_on_fake_tensors() -> None:
    with FakeTensorMode(), torch.no_grad():
        ids, mask = texts()
        assert token_log_probabilities(hugging_face("gpt2"), ids, mask, 4 * TEXTS * VOCABULARY).shape == (TEXTS, 10)


class heads_called:
    """A context that records the shapes of the logits that the head computes in the block."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._hook = model.lm_head.register_forward_hook(lambda _, __, logits: self._shapes.append(tuple(logits.shape)))

    def __enter__(self) -> list[tuple[int, ...]]:
        return self._shapes

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def test_the_head_s_weights_are_not_copied_for_a_part_of_the_texts():
    """Non-contiguous hidden states would be multiplied text by text, in bfloat16 each time with copied weights."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=300, n_positions=32))
    model = model.to(torch.bfloat16).eval()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous()))
    ids = torch.randint(300, (3, 12))
    with torch.inference_mode():
        token_log_probabilities(model, ids, torch.ones_like(ids), chunk_numbers=300 * 3 * 4)
    assert seen == [True, True, True]
