"""A test of models finds those that keep packed texts apart."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from plimsoll.data.samples.packable import packing_fault

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "use_cache": False,
}


def causal(kind: str, attention: str | None = "sdpa", **fields: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_causal_models_of_transformers_keep_texts_apart(kind: str, attention: str):
    model = causal(kind, attention)
    model.train()
    assert packing_fault(model) is None
    assert all(module.training for module in model.modules())


def test_a_cache_switches_packing_off():
    fault = packing_fault(causal("llama", use_cache=True))
    assert fault is not None
    assert "LlamaForCausalLM, the output for a text changes with the text before it" in fault
    assert "set use_cache=False" in fault


def test_a_state_space_model_carries_its_state_over():
    fault = packing_fault(causal("mamba", None, state_size=4))
    assert fault is not None
    assert "carry a state over" in fault


def test_attention_that_ignores_positions_needs_a_mask():
    fault = packing_fault(causal("opt"))
    assert fault is not None
    assert "attention does not stop" in fault
    assert packing_fault(causal("opt"), mask="causal") is None


def test_an_encoder_needs_a_mask():
    config = AutoConfig.for_model("bert", **SMALL)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
    fault = packing_fault(model)
    assert fault is not None
    assert "attention does not stop" in fault
    assert packing_fault(model, mask="bidirectional") is None


class Recurrent(nn.Module):
    def __init__(self, takes_positions: bool) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(64, 8), nn.LSTM(8, 8, batch_first=True)
        if takes_positions:
            self.forward = self.with_positions

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.lstm(self.embedding(input_ids))[0],)

    def with_positions(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        return self.forward_of(input_ids)

    def forward_of(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.lstm(self.embedding(input_ids))[0],)


def test_a_recurrent_network_cannot_be_packed():
    assert packing_fault(Recurrent(False)) == (
        "Recurrent takes no position_ids, so it cannot tell where a text of a row begins"
    )
    fault = packing_fault(Recurrent(True))
    assert fault is not None
    assert "its LSTM carries its state from one text into the next" in fault


class PerToken(nn.Module):
    """A model that keeps texts apart, but, with ``of_row``, ignores positions that restart."""

    def __init__(self, of_row: bool, has_output: bool = True) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(64, 8), nn.Embedding(64, 8)
        self.of_row, self.has_output = of_row, has_output

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        places = torch.arange(input_ids.shape[1]) if self.of_row else position_ids
        output = self.embedding(input_ids) + self.places(places)
        return (output if self.has_output else torch.zeros_like(output),)


def test_positions_must_begin_anew():
    assert packing_fault(PerToken(of_row=False)) is None
    fault = packing_fault(PerToken(of_row=True))
    assert fault is not None
    assert "PerToken returns other outputs for a text after another text than alone" in fault


def test_what_cannot_be_told_is_a_fault():
    fault = packing_fault(PerToken(of_row=False, has_output=False))
    assert fault is not None
    assert "do not depend on its inputs" in fault


def test_a_classifier_has_no_output_per_token():
    class Pooled(PerToken):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor]:
            return (super().forward(input_ids, position_ids)[0].mean(1),)

    fault = packing_fault(Pooled(of_row=False))
    assert fault is not None
    assert "cannot read packed rows (its output has shape (2, 8), not one per token" in fault
