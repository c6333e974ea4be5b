"""Models for tests of techniques, in addition to `workloads`; each is called as ``model(**batch).loss``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from plimsoll.models.workload import Workload, model_loss
from workloads import NUM_SAMPLES, VOCABULARY, Output, bert, classes, gpt2, text

ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def t5(**fields) -> nn.Module:
    """Build an encoder and decoder whose first blocks compute the position biases of the others; with a cache."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**(sizes | ENDS | {"decoder_start_token_id": 0} | fields)))


def llama(**fields) -> nn.Module:
    """Build a model with fewer keys than queries; with a cache."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | ENDS | fields)))


def gpt2_with(**fields) -> nn.Module:
    """Build a GPT-2 of another size."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**(sizes | ENDS | {"loss_type": "ForCausalLMLoss"} | fields)))


def gpt2_with_cache() -> nn.Module:
    return gpt2_with(use_cache=True)


class Block(nn.Module):
    """A user's block: keyword arguments, a dictionary that it fills, a tuple with ``None`` as its result, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.inner = nn.Linear(16, 64)
        self.outer = nn.Linear(64, 16)

    def forward(self, hidden: Tensor, *, scale: Tensor, seen: dict[str, Tensor], unused: None = None):
        normed = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        seen["sum"] = seen["sum"] + hidden.sum() if "sum" in seen else hidden.sum()
        inner = nn.functional.dropout(torch.relu(self.inner(normed)), 0.1, self.training)
        return hidden + self.outer(inner) * scale, None


class Blocks(nn.Module):
    """Blocks in numbered attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.block1, self.block2, self.block3 = Block(), Block(), Block()
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden, seen = self.embedding(input_ids), {}
        for block in (self.block1, self.block2, self.block3):
            hidden, nothing = block(hidden, scale=self.scale, seen=seen)
            assert nothing is None
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return Output(loss + 1e-3 * seen["sum"])


class StackedLstm(nn.Module):
    """Recurrent layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([nn.LSTM(16, 16, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = nn.functional.dropout(layer(hidden)[0], 0.1, self.training)
        return Output(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


WITH_BLOCKS = {
    "gpt2": (gpt2, text),
    "gpt2_with_cache": (gpt2_with_cache, text),
    "bert": (bert, classes),
    "t5": (t5, text),
    "llama": (llama, text),
    "blocks": (Blocks, text),
    "lstms": (StackedLstm, text),
}


def fresh(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model in training mode, always with the same weights, and a batch of 8."""
    build, data = WITH_BLOCKS[name]
    torch.manual_seed(0)
    model = build().train()
    batch = {field: values[: NUM_SAMPLES // 4].clone() for field, values in data().items()}
    if name in ("blocks", "lstms"):
        batch["labels"] = batch["input_ids"]
    return model, batch


def workload_of(model: nn.Module) -> Workload:
    """Return the model's training with SGD and its own loss, which averages over samples."""
    return Workload(model, torch.optim.SGD(model.parameters()), model_loss, "samples")
