import functools

import pytest
import torch
import transformers
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

from plimsoll.device.base import backend_for
from plimsoll.models.recurrent.model import RecurrentConfig, RecurrentLanguageModel
from plimsoll.models.workload import Workload, model_loss
from plimsoll.step.losses.additive import loss_check_of
from plimsoll.step.losses.known import is_usual, known_additive, known_reason, shifts_labels

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


class Whiten(nn.Module):
    """A user's module that computes across samples."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x - x.mean(0, keepdim=True))


def whitened(layer, given):
    return (given[0] - given[0].mean(0, keepdim=True),)


def own_module(model):
    model.classifier = Whiten(model.classifier)


def own_hook(model):
    model.classifier.register_forward_pre_hook(whitened)


def own_hook_of_gradients(model):
    model.classifier.register_full_backward_pre_hook(whitened)


def own_forward_of_a_part(model):
    model.classifier.forward = Whiten(model.classifier).forward


def own_function_of_a_part(model):
    model.bert.pooler.act = lambda x: x - x.mean(0, keepdim=True)


def own_wrapper(model):
    model.forward = functools.wraps(model.forward)(lambda *arguments, **options: None)


def layer_across_samples(model):
    model.classifier = nn.Sequential(nn.Softmax(dim=0), model.classifier)


def layer_over_time(model):
    model.classifier = nn.Sequential(nn.TransformerEncoderLayer(8, 2), model.classifier)


@pytest.mark.parametrize(
    "change",
    [
        own_module, own_hook, own_hook_of_gradients, own_forward_of_a_part, own_function_of_a_part, own_wrapper,
        layer_across_samples, layer_over_time,
    ],
)  # fmt: skip
def test_nothing_is_known_of_a_head_in_which_something_is_the_users(change):
    model = BertForSequenceClassification(BERT)
    assert known_additive(training(model, "samples"))
    change(model)
    assert not known_additive(training(model, "samples"))


def test_nor_where_a_class_a_function_or_every_module_was_changed(monkeypatch):
    def is_known():
        return known_additive(training(GPT2LMHeadModel(GPT2), "next-tokens"))

    assert is_known()
    for where, name in [
        (GPT2LMHeadModel, "forward"),
        (transformers.models.gpt2.modeling_gpt2.GPT2Attention, "forward"),
        (transformers.loss.loss_utils, "fixed_cross_entropy"),
        (nn.functional, "cross_entropy"),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, functools.wraps(getattr(where, name))(lambda *given, **options: None))
            assert not is_known(), name
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, given: None)
    assert not is_known()
    handle.remove()
    assert is_known()


DECODER = {
    "vocab_size": 20, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "max_position_embeddings": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Bart", "MBart", "Pegasus", "Blenderbot"])
def test_decoders_that_do_not_shift_their_labels_are_compared_with_the_units_that_are_right(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**DECODER)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    lengths = torch.tensor([2, 2, 8, 8])
    tokens = torch.randint(3, 20, (4, 8))
    batch = {"input_ids": tokens, "labels": torch.where(torch.arange(8) < lengths[:, None], tokens, -100)}
    verdicts = {
        units: loss_check_of(training(model, units), batch, backend_for("cpu"), recut_loss=False, never_cut=False)
        for units in ("tokens", "next-tokens")
    }
    assert [one.verdict for one in verdicts.values()] == ["additive", "not additive"]
    assert not shifts_labels(model)
    assert shifts_labels(GPT2LMHeadModel(GPT2))


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
