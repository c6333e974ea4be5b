"""Recurrent models that `recurrent_prediction.py` refers to by function, and that a job file cannot describe.

They are: a padded batch read without packing in both directions, packed samples of different lengths, a projected LSTM,
and ReLU cells. Each function takes ``vocab_size`` and ``num_labels`` (``None`` for a language model), as the model
function of a job does. Shapes: B samples, T tokens, E embedding size, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Recurrent(nn.Module):
    """An embedding, recurrent layers and a linear head on every output, or on the mean of the outputs.

    Args:
        layers: the recurrent layers, with ``width`` inputs per token.
        width: embedding size.
        output_size: outputs of the layers per token.
        vocab_size: number of embeddings, and of outputs of a language model.
        num_labels: outputs of a classifier; ``None`` for a language model.
        is_packed: pack the batch; the last of B samples has half the length of the first.
    """

    def __init__(
        self, layers: nn.RNNBase, width: int, output_size: int, vocab_size: int, num_labels: int | None, is_packed: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = layers
        self.head = nn.Linear(output_size, num_labels or vocab_size)
        self.is_packed, self.is_classifier = is_packed, num_labels is not None

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Output:
        data: Any = self.embedding(input_ids)
        if self.is_packed:
            num_samples, num_steps = input_ids.shape
            lengths = torch.arange(num_samples).mul(-num_steps).div(2 * num_samples, rounding_mode="floor") + num_steps
            data = pack_padded_sequence(data, lengths, batch_first=True)
        output, _ = self.layers(data)
        if not self.is_classifier:
            logits = self.head(output)
            return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)
        logits = self.head(output.data.mean(0).expand(len(labels), -1) if self.is_packed else output.mean(1))
        return Output(functional.cross_entropy(logits, labels), logits)


def _recurrent(
    make: type[nn.RNNBase], width: int, vocab_size: int, num_labels: int | None, is_packed: bool = False, **options: Any
) -> nn.Module:
    layers = make(width, width, batch_first=True, **options)
    output_size = (layers.proj_size or width) * (1 + layers.bidirectional)
    return Recurrent(layers, width, output_size, vocab_size, num_labels, is_packed)


def lstm_projected(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.LSTM, 256, vocab_size, num_labels, num_layers=2, proj_size=64)


def lstm_both_ways(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.LSTM, 256, vocab_size, num_labels, num_layers=2, bidirectional=True, dropout=0.2)


def gru_both_ways(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.GRU, 256, vocab_size, num_labels, num_layers=2, bidirectional=True, dropout=0.2)


def rnn_relu_both_ways(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.RNN, 256, vocab_size, num_labels, bidirectional=True, nonlinearity="relu")


def lstm_packed(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.LSTM, 256, vocab_size, num_labels, is_packed=True)


def lstm_packed_both_ways(vocab_size: int, num_labels: int | None) -> nn.Module:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dropout": 0.2}
    return _recurrent(nn.LSTM, 256, vocab_size, num_labels, is_packed=True, **options)


def gru_packed_both_ways(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.GRU, 256, vocab_size, num_labels, is_packed=True, bidirectional=True)


def lstm_packed_projected(vocab_size: int, num_labels: int | None) -> nn.Module:
    return _recurrent(nn.LSTM, 256, vocab_size, num_labels, is_packed=True, proj_size=64)
