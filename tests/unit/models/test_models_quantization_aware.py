"""Quantization-aware training: an evaluation during training gives the results of the quantized model."""

import pytest
import torch

from plimsoll.compression.saving import form_of
from plimsoll.errors import JobError
from plimsoll.models.build import save_model
from plimsoll.models.loading import load_model
from plimsoll.models.quantization_aware import train_for_integers
from plimsoll.models.recurrent.model import build_recurrent
from quantized_models import IDS, logits, made, shrunk

ROUNDING = ("FakeQuantizedLinear", "RoundedConv1D")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_after_training_the_quantized_model_gives_what_the_evaluation_saw(name, kind, tmp_path):
    model = made(name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10)  # so that rounding matters
    dense = logits(model)
    names = {one for one, _ in model.named_parameters()}
    train_for_integers(model, kind)
    assert {one for one, _ in model.named_parameters()} == names
    assert not torch.allclose(logits(model), dense, atol=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = IDS if name != "bert" else torch.tensor([0, 1])
    for _ in range(2):
        loss = model(IDS, labels=labels).loss
        loss.backward()
        rounding = [module for module in model.modules() if type(module).__name__ in ROUNDING]
        assert rounding
        assert all(module.weight.grad.any() for module in rounding)
        optimizer.step()
        optimizer.zero_grad()
    seen = logits(model)
    save_model(model, tmp_path)
    assert form_of(model) == "plain"
    assert not [*tmp_path.glob("*.py")], "code, which a plain folder needs not"
    loaded = load_model(tmp_path).model
    assert not torch.allclose(logits(loaded), seen, atol=1e-5), "dense"
    stock = type(made(name)).from_pretrained(tmp_path).eval()
    assert torch.allclose(logits(stock), logits(loaded), atol=1e-6)
    options = {"compute": "fp32"} if kind == "int4" else {}
    assert torch.allclose(logits(shrunk(kind, loaded, **options)), seen, atol=1e-5 * seen.abs().max())


def test_nothing_is_drawn_for_it():
    model = made("bert")
    state = torch.random.get_rng_state()
    train_for_integers(model, "int8")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_models_that_it_cannot_be_are_refused():
    fields = {"architecture": "lstm", "vocab_size": 20, "embedding_size": 8, "hidden_size": 8}
    with pytest.raises(JobError, match="quantization_aware: int8 is for models of transformers"):
        train_for_integers(build_recurrent(fields), "int8")
    with pytest.raises(JobError, match="quantization_aware: int4 finds none of the layers it looked for"):
        train_for_integers(made("bert", hidden_size=24, intermediate_size=40), "int4")
