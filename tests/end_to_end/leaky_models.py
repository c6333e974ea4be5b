"""Models for job files (`model: leaky_models:collects`) that keep too much from step to step, each in its own way.

All are the language model of `_Model`: its outputs are 128 float32 per token, 512 bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HIDDEN_SIZE = 128
ARRAY_BYTES = 4 << 20


class _Model(nn.Module):
    """A recurrent language model with the interface of Hugging Face models."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 32)
        self.recurrent = nn.GRU(32, HIDDEN_SIZE, batch_first=True)
        self.head = nn.Linear(HIDDEN_SIZE, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        logits = self.head(self.encode(self.embedding(input_ids)))
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)

    def encode(self, embedded: Tensor) -> Tensor:
        return self.recurrent(embedded)[0]


class Healthy(_Model):
    """A model that keeps its detached state and its last output, with the graph of the last step only."""

    state: Tensor | None = None
    last_output: Tensor | None = None

    def encode(self, embedded: Tensor) -> Tensor:
        if not self.training:
            return super().encode(embedded)
        is_usable = self.state is not None and self.state.shape[1] == len(embedded)
        output, state = self.recurrent(embedded, self.state if is_usable else None)
        self.state = state.detach()
        self.last_output = output
        return output


class Collects(_Model):
    """A model that collects all its outputs with their graphs."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.history: list[Tensor] = []

    def encode(self, embedded: Tensor) -> Tensor:
        output = super().encode(embedded)
        if self.training:
            self.history.append(output)
        return output


class Averages(_Model):
    """A model that keeps a running mean of its outputs, which no loss uses."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("mean_output", torch.zeros(HIDDEN_SIZE), persistent=False)

    def encode(self, embedded: Tensor) -> Tensor:
        output = super().encode(embedded)
        if self.training:
            self.mean_output = 0.9 * self.mean_output + 0.1 * output.mean((0, 1))
        return output


class FeedsBack(_Model):
    """A model that starts each batch with the final state of the previous one, with its graph."""

    hidden: Tensor | None = None

    def encode(self, embedded: Tensor) -> Tensor:
        if not self.training:
            return super().encode(embedded)
        output, hidden = self.recurrent(embedded, self.hidden)
        self.hidden = hidden
        return output


class Hoards(_Model):
    """A model that keeps 4 MiB of numbers per step, which are in no graph."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.arrays: list[np.ndarray] = []

    def encode(self, embedded: Tensor) -> Tensor:
        if self.training:
            self.arrays.append(np.ones(ARRAY_BYTES // 8))
        return super().encode(embedded)


def healthy(vocab_size: int) -> nn.Module:
    return Healthy(vocab_size)


def collects(vocab_size: int) -> nn.Module:
    return Collects(vocab_size)


def averages(vocab_size: int) -> nn.Module:
    return Averages(vocab_size)


def feeds_back(vocab_size: int) -> nn.Module:
    return FeedsBack(vocab_size)


def hoards(vocab_size: int) -> nn.Module:
    return Hoards(vocab_size)
