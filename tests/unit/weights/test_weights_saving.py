"""Weights that share one buffer, like the weights of cuDNN's recurrent layers, are written and read back."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from plimsoll.weights.saving import _WithoutSharedStorages, save_weights


def flattened(module: nn.Module) -> nn.Module:
    """Make the weights views of one buffer, as ``flatten_parameters`` does on CUDA."""
    weights = list(module.parameters())
    buffer = torch.cat([weight.detach().flatten() for weight in weights])
    offset = 0
    for weight in weights:
        weight.data = buffer[offset : offset + weight.numel()].view_as(weight)
        offset += weight.numel()
    return module


class Tied(nn.Module):
    """A model with two names for each weight of an LSTM, and an embedding that is tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.rnn = flattened(nn.LSTM(4, 3, num_layers=2))
        self.same = self.rnn


@pytest.mark.parametrize("make", [Tied, lambda: flattened(nn.GRU(4, 3, bidirectional=True)), lambda: nn.Linear(2, 3)])
def test_the_file_has_the_weights_of_the_model(tmp_path, make):
    model = make()
    save_weights(model, tmp_path / "model.safetensors")
    saved, names = load_file(tmp_path / "model.safetensors"), dict(model.named_parameters())
    assert set(saved) == set(names)  # a tied tensor is saved once
    assert all(torch.equal(saved[name], weight) for name, weight in names.items())


def test_what_has_a_storage_of_its_own_is_not_copied():
    model = nn.Linear(2, 3)
    assert _WithoutSharedStorages(model).state_dict()["weight"].data_ptr() == model.weight.data_ptr()


@pytest.mark.gpu
def test_a_model_that_cudnn_has_flattened_is_written(tmp_path):
    model = nn.LSTM(8, 8, num_layers=2, device="cuda")
    model(torch.zeros(2, 3, 8, device="cuda"))
    save_weights(model, tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors", device="cuda")
    assert all(torch.equal(saved[name], weight) for name, weight in model.named_parameters())
