"""Weights in bfloat16: half the bytes, values equal to two digits, and loading without Plimsoll."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.bf16 import Bf16
from plimsoll.inference.model import load_for_inference
from plimsoll.models.recurrent.model import build_recurrent, save_recurrent
from plimsoll.records.plan import Choice
from plimsoll.weights.parts import model_bytes
from quantized_models import made, shrunk

CHOICE = Choice(technique="bf16")


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def test_half_the_bytes_and_loaded_as_it_is(tmp_path):
    bundle = Bundle(model())
    ids = torch.arange(10)[None]
    with torch.no_grad():
        wanted, before_bytes = bundle.model(ids).logits, model_bytes(bundle.model)
        Bf16().shrink(bundle, CHOICE, Calibration())
        found = bundle.model(ids).logits
        assert model_bytes(bundle.model) * 2 == before_bytes
        assert torch.allclose(found.float(), wanted, atol=0.02)
        bundle.model.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, found)


@pytest.mark.parametrize("kind", ["language model", "classifier", "tagger"])
@pytest.mark.parametrize("architecture", ["lstm", "gru", "rnn"])
def test_recurrent_models_are_loaded_in_what_their_file_has(architecture, kind, tmp_path):
    fields = {"architecture": architecture, "vocab_size": 50, "embedding_size": 16, "hidden_size": 16}
    labels = {} if kind == "language model" else {"num_labels": 3, "is_tagger": kind == "tagger"}
    torch.manual_seed(0)
    small = build_recurrent(fields | labels).eval()
    ids = torch.arange(12).view(2, 6)
    asked = {"input_ids": ids, "labels": {"tagger": ids % 3, "classifier": ids[:, 0] % 3}.get(kind, ids)}
    with torch.no_grad():
        wanted, before_bytes = small(**asked), model_bytes(small)
        assert Bf16().refusal(Bundle(small), CHOICE) is None
        Bf16().shrink(Bundle(small), CHOICE, Calibration())
        found = small(**asked)
        assert model_bytes(small) * 2 == before_bytes
        assert torch.allclose(found.logits.float(), wanted.logits, atol=0.02)
        assert found.loss.dtype == torch.float32
        save_recurrent(small, tmp_path)
        loaded = load_for_inference(tmp_path, "none", None, "cpu")
        assert torch.equal(loaded(**asked).logits, found.logits)
        assert load_for_inference(tmp_path, "none", torch.float32, "cpu").head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "choice", "said"),
    [
        (lambda: nn.LSTM(4, 4), CHOICE, "LSTM has no configuration"),
        (lambda: model().bfloat16(), CHOICE, "no weight of GPT2LMHeadModel is wider than 16 bits"),
        (
            lambda: shrunk("float8", made("bert")),
            CHOICE,
            "bf16: bert.encoder.layer.0.attention.self.query.weight is quantized and cannot be converted: use bf16",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, choice, said):
    assert said in Bf16().refusal(Bundle(make()), choice)
