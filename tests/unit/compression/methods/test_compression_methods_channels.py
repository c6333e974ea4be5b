"""Removal of feed-forward channels: dead channels without loss, each importance score, and refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from plimsoll.compression.methods import Bundle, Calibration
from plimsoll.compression.methods.channels import Channels, input_dim
from plimsoll.errors import WeightsError
from plimsoll.records.plan import Choice
from pruned_models import ARCHITECTURES, batches_of, logits_of, num_weights, shapes_of, small_model

DEAD = [1, 2, 5, 8, 13, 23]  # a quarter of 24
CHANNELS = Channels()


def chosen(**options: float | str) -> Choice:
    return Choice(technique="channels", options=options)


def readers(model: nn.Module) -> list[nn.Module]:
    """Return the layers from 24 channels to 16, one per block."""
    return [one for one in model.modules() if input_dim(one) is not None and sorted(one.weight.shape) == [16, 24]
            and one.weight.shape[input_dim(one)] == 24]  # fmt: skip


def kill(model: nn.Module) -> None:
    for layer in readers(model):
        rows = layer.weight.data if input_dim(layer) == 0 else layer.weight.data.T
        rows[DEAD] = 0


def with_width(name: str) -> dict[str, int]:
    return {"n_inner": 24} if name == "gpt2" else {}


@pytest.mark.parametrize("importance", ["magnitude", "taylor", "activation"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dead_channels_leave_without_a_trace(name: str, importance: str):
    model = small_model(name, **with_width(name))
    kill(model)
    before, bundle, choice = logits_of(model), Bundle(model), chosen(share=0.25, importance=importance)
    num_before = num_weights(model)
    CHANNELS.shrink(bundle, choice, Calibration(lambda: batches_of(model)))
    torch.testing.assert_close(logits_of(bundle.model), before, rtol=0, atol=1e-6)
    assert num_weights(bundle.model) < num_before
    on_meta = Bundle(small_model(name, "meta", **with_width(name)))
    CHANNELS.shrink(on_meta, choice, Calibration())
    assert shapes_of(on_meta.model) == shapes_of(bundle.model)


def test_the_configuration_says_how_many_are_left():
    bundle = Bundle(small_model("gpt2"))  # its n_inner is None, which means 64
    CHANNELS.shrink(bundle, chosen(share=0.5), Calibration())
    assert bundle.model.config.n_inner == 32
    assert bundle.model.transformer.h[0].mlp.c_fc.nf == 32


def test_a_channel_is_judged_by_what_writes_and_what_reads_it():
    model = small_model("llama")
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight.fill_(1.0)
        mlp.down_proj.weight.copy_(torch.arange(24.0).expand(16, 24))
        mlp.gate_proj.weight[22:] = 0.0  # silu(0) is 0, so large outgoing weights have no effect
    CHANNELS.shrink(Bundle(model), chosen(share=0.5), Calibration())
    assert mlp.down_proj.weight[0].tolist() == list(range(10, 22))


def test_the_same_arguments_keep_the_same_channels():
    kept = []
    for _ in range(2):
        model = small_model("bert")
        CHANNELS.shrink(Bundle(model), chosen(importance="taylor"), Calibration(lambda: batches_of(model)))
        kept.append(model.state_dict())
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_what_is_left_can_be_trained_and_made_smaller_again():
    model = small_model("bert")
    for width in (18, 14):
        CHANNELS.shrink(Bundle(model), chosen(), Calibration())
        assert model.config.intermediate_size == width
        model(**next(batches_of(model))).loss.backward()
        assert all(one.grad.isfinite().all() for one in model.parameters())
        model.zero_grad(set_to_none=True)


def test_it_offers_an_eighth_a_quarter_and_a_half():
    assert [str(choice) for choice in CHANNELS.choices(Bundle(small_model("bert", "meta")))] == [
        "channels=0.125", "channels=0.25", "channels=0.5",
    ]  # fmt: skip


def test_experts_and_models_without_such_layers_are_refused_with_what_was_looked_for():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    with torch.device("meta"):
        experts = transformers.MixtralForCausalLM(config)
    assert "channels in a MixtralExperts: looked for two linear layers" in CHANNELS.choices(Bundle(experts))
    said = CHANNELS.choices(Bundle(nn.Linear(2, 2)))
    assert "Linear has no feed-forward pair: looked for two linear layers x -> intermediate_size -> x" in said
    with pytest.raises(WeightsError, match="no feed-forward pair"):
        CHANNELS.shrink(Bundle(nn.Linear(2, 2)), chosen(), Calibration())


def test_a_share_of_no_channel_is_refused():
    said = "a share of 0.01 of 24 channels is none of them: give a share from 0.0417 to 0.958"
    assert CHANNELS.refusal(Bundle(small_model("bert", "meta")), chosen(share=0.01)) == said
