import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from plimsoll.models.recurrent import RecurrentConfig, RecurrentLanguageModel
from plimsoll.run.known_losses import is_usual, known_additive, known_reason
from plimsoll.workload import Workload, model_loss

BERT = BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
)
GPT2 = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)


def training(model, units, loss=model_loss):
    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, units)


def moe(coefficient, output_router_logits=True):
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=20, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=4, num_experts=4, num_experts_per_tok=2,
            output_router_logits=output_router_logits, router_aux_loss_coef=coefficient,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "units", "known"),
    [
        (lambda: GPT2LMHeadModel(GPT2), "next-tokens", True),
        (lambda: GPT2LMHeadModel(GPT2), "samples", False),
        (lambda: GPT2LMHeadModel(GPT2), lambda batch: 1, False),
        (lambda: BertForMaskedLM(BERT), "tokens", True),
        (lambda: BertForSequenceClassification(BERT), "samples", True),
        (lambda: nn.Linear(2, 2), "samples", False),
        (lambda: moe(0.1, output_router_logits=False), "next-tokens", True),
        (lambda: moe(0.1), "next-tokens", False),
    ],
)
def test_a_head_of_transformers_with_its_own_loss_and_units_is_known(make, units, known):
    assert known_additive(training(make(), units)) is known


def test_a_head_is_not_known_by_its_name():
    class BertForMaskedLMWithMore(BertForMaskedLM):
        pass

    other_loss = BertForMaskedLM(BERT)
    other_loss.loss_function = lambda *arguments, **options: None
    other_forward = BertForMaskedLM(BERT)
    other_forward.forward = other_forward.forward
    own_loss = training(BertForMaskedLM(BERT), "tokens", lambda model, batch: model(**batch).loss)
    for workload in (
        *(training(m, "tokens") for m in (BertForMaskedLMWithMore(BERT), other_loss, other_forward)),
        own_loss,
    ):
        assert not known_additive(workload)


def test_plimsolls_own_models_are_known_with_their_units():
    model = RecurrentLanguageModel(RecurrentConfig(architecture="lstm", vocab_size=20, hidden_size=4))
    assert known_additive(training(model, "next-tokens"))
    assert not known_additive(training(model, "samples"))


def test_the_balance_of_a_router_is_known_not_to_be_additive():
    reason = known_reason(training(moe(0.1), "next-tokens"))
    assert reason is not None
    assert "balance term of its router (output_router_logits=True, router_aux_loss_coef=0.1)" in reason.why
    assert "output_router_logits=False" in reason.remedy
    assert known_reason(training(moe(0.0), "next-tokens")) is None
    assert known_reason(training(moe(0.1, output_router_logits=False), "next-tokens")) is None


def test_other_fields_and_ignored_labels_of_samples_are_unusual():
    workload = training(BertForSequenceClassification(BERT), "samples")
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([0, 1])}
    assert is_usual(batch, workload)
    assert not is_usual(batch | {"labels": torch.tensor([0, -100])}, workload)
    assert not is_usual(batch | {"num_items_in_batch": 3}, workload)
