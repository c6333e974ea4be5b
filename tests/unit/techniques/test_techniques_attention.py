"""Eager attention is replaced, gives the same results without saving scores, and is restored."""

import pytest
import torch
from torch import nn
from traced_steps import dry_run, recorded
from transformers import BertConfig, BertForSequenceClassification, EncoderDecoderConfig, EncoderDecoderModel

from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.models.workload import model_loss
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, conflict_among, installed
from plimsoll.techniques.attention import Attention
from technique_models import fresh, gpt2_with, llama, t5, workload_of
from workloads import Lstm, largest_relative_difference

SDPA = (Choice(technique="attention", options={"backend": "sdpa"}),)
CPU = Setting(device="cpu", batch_size=8)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EAGER = {"attn_implementation": "eager"}


def bert(**fields):
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **rates, vocab_size=50, num_labels=3, **fields))


def long_gpt2(length=256):
    torch.manual_seed(0)
    model = gpt2_with(n_positions=length, **NO_DROPOUT, **EAGER).train()
    ids = torch.randint(50, (2, length))
    return model, {"input_ids": ids, "labels": ids}


EAGER_MODELS = {
    "gpt2": lambda: gpt2_with(**NO_DROPOUT, **EAGER),
    "bert": lambda: bert(**EAGER),
    "t5": lambda: t5(dropout_rate=0.0, **EAGER),
    "llama": lambda: llama(attention_dropout=0.0, **EAGER),
}


@pytest.mark.parametrize("name", EAGER_MODELS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
def test_loss_and_gradients_agree(name, is_padded):
    torch.manual_seed(0)
    model = EAGER_MODELS[name]().train()
    _, batch = fresh("bert" if name == "bert" else "gpt2")
    if is_padded:
        batch["attention_mask"] = torch.ones(8, 12, dtype=int)
        batch["attention_mask"][:4, 8:] = 0
    results = []
    for choices in ((), SDPA):
        model.zero_grad()
        with installed(workload_of(model), choices):
            loss = model_loss(model, batch)
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | gradients)
    assert largest_relative_difference(*results) < 1e-5


def test_the_scores_of_a_long_sequence_are_gone():
    """2 samples, 2 heads and 256 x 256 floats: each tensor of scores has 1 MiB, and eager attention saves several."""
    model, batch = long_gpt2()
    peaks = []
    for choices in ((), SDPA):
        predicted = live_bytes(dry_run(model, batch, choices)).peak_bytes
        assert predicted == live_bytes(recorded(model, batch, choices)).peak_bytes
        peaks.append(predicted)
    assert peaks[0] - peaks[1] > 2 * 2**20


def test_the_scores_are_gone_on_cuda_also_with_dropout():
    model, batch = long_gpt2()
    model.config.attn_pdrop = 0.1
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.1
    peaks = [live_bytes(dry_run(model, batch, choices, CudaLowering((8, 6)))).peak_bytes for choices in ((), SDPA)]
    assert peaks[0] - peaks[1] > 2 * 2**20


@pytest.mark.parametrize("name", EAGER_MODELS)
def test_every_config_is_restored(name):
    model = EAGER_MODELS[name]()
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [dict(vars(config)) for config in configs.values()]
    with installed(workload_of(model), SDPA):
        assert {config._attn_implementation for config in configs.values()} == {"sdpa"}
    assert [dict(vars(config)) for config in configs.values()] == before


def test_the_choices():
    choices_of = Attention().choices
    assert choices_of(workload_of(long_gpt2()[0]), CPU) == SDPA
    assert choices_of(workload_of(gpt2_with()), CPU) == "GPT2LMHeadModel does not use eager attention, but sdpa"
    assert choices_of(workload_of(Lstm()), CPU).startswith("Lstm is not a model of transformers")
    model = long_gpt2()[0]
    model.config.output_attentions = True
    assert "returns attention weights (output_attentions)" in choices_of(workload_of(model), CPU)
    assert choices_of(workload_of(nn.Sequential(long_gpt2()[0])), CPU) == SDPA


def test_a_part_that_cannot_is_said():
    side = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(side, side)
    model = EncoderDecoderModel(config)
    model.set_attn_implementation("eager")
    before = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    answer = Attention().choices(workload_of(model), CPU)
    if not isinstance(answer, str):
        with installed(workload_of(model), answer):
            assert model.encoder.config._attn_implementation == "sdpa"
    assert [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")] == before


def test_another_backend_is_refused():
    flex = (Choice(technique="attention", options={"backend": "flex"}),)
    assert "there is no attention backend `flex`: give sdpa" in conflict_among(flex, workload_of(long_gpt2()[0]), CPU)
