"""The models that every tool of the headline experiment trains, without Plimsoll.

A task folder has ``task.json`` (``model``: gpt2, bert, t5 or lstm, ``config``: its arguments), ``weights.safetensors``
with the initial weights, and ``batches.safetensors`` with ``0.input_ids``, ``0.labels`` and so on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

Fields = dict[str, Tensor]


class PrefixT5(T5ForConditionalGeneration):
    """T5 as a prefix language model: the encoder reads the first half of a text, the decoder writes the second."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """Compute the mean loss over the second half of ``input_ids`` (B, T)."""
        half = input_ids.shape[1] // 2
        return super().forward(input_ids=input_ids[:, :half], labels=input_ids[:, half:].contiguous())

    def hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output layer's inputs, (B, T / 2, D), and the labels (B, T / 2), for losses that compute the
        logits.
        """
        half = input_ids.shape[1] // 2
        labels = input_ids[:, half:].contiguous()
        encoded = self.encoder(input_ids=input_ids[:, :half])[0]
        decoded = self.decoder(input_ids=self._shift_right(labels), encoder_hidden_states=encoded, use_cache=False)[0]
        return decoded * self.model_dim**-0.5 if self.config.scale_decoder_outputs else decoded, labels


def prefix_t5(vocab_size: int) -> PrefixT5:
    """Build T5-small without dropout; a job refers to it as ``model: models:prefix_t5``."""
    return PrefixT5(T5Config(vocab_size=vocab_size, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))


class Output(NamedTuple):
    """The output of a language model."""

    loss: Tensor
    logits: Tensor


class LSTMLanguageModel(nn.Module):
    """An LSTM language model as in tutorials: embedding, layers, output, and cross entropy of the next token."""

    def __init__(self, vocab_size: int, embedding_size: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.recurrent = nn.LSTM(embedding_size, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        """Compute the logits (B, T - 1, V) and the mean loss of ``labels[:, 1:]``."""
        hidden_BTH, _ = self.recurrent(self.embedding(input_ids[:, :-1]))
        logits_BTV = self.head(hidden_BTH)
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits_BTV)


def build(folder: Path) -> nn.Module:
    """Build the model of a task with the common initial weights."""
    task = json.loads((folder / "task.json").read_text())
    kind, config = task["model"], task["config"]
    model: nn.Module
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**config, use_cache=False))  # not used in training
    elif kind == "bert":
        model = BertForSequenceClassification(BertConfig(**config))
    elif kind == "t5":
        model = prefix_t5(**config)
    elif kind == "lstm":
        model = LSTMLanguageModel(**config)
    else:
        raise ValueError(f"no model {kind!r}")
    parameters = dict(model.named_parameters())
    with (
        safe_open(folder / "weights.safetensors", "np") as file,
        torch.no_grad(),
    ):  # "pt" would map the file as private memory
        for name in file.keys():  # noqa: SIM118  -- not a mapping
            parameters[name].copy_(torch.from_numpy(file.get_tensor(name)))
    return model.train()


def batches(folder: Path) -> list[Fields]:
    """Load the batches of a task, one for each optimizer step."""
    found: dict[int, Fields] = {}
    with safe_open(folder / "batches.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            number, name = key.split(".")
            found.setdefault(int(number), {})[name] = file.get_tensor(key)
    return [found[number] for number in sorted(found)]
