"""Small transformers checkpoints with random weights, saved as by users, and batches of texts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

NUM_TOKENS = 120
TOKENS: dict[str, Any] = {"vocab_size": NUM_TOKENS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(**changes: Any) -> PreTrainedModel:
    """Build a GPT-2 whose output layer is tied to its embeddings."""
    fields = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64} | TOKENS | changes
    return AutoModelForCausalLM.from_config(GPT2Config(**fields))


def llama(**changes: Any) -> PreTrainedModel:
    """Build a Llama with an untied output layer."""
    fields = {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(LlamaConfig(**(fields | TOKENS | changes)))


def bert(**changes: Any) -> PreTrainedModel:
    """Build a BERT with three classes."""
    fields = {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_labels": 3,
        "max_position_embeddings": 64,
    }  # fmt: skip
    return AutoModelForSequenceClassification.from_config(BertConfig(**(fields | TOKENS | changes)))


FAMILIES = {"gpt2": (gpt2, "score"), "llama": (llama, "score"), "bert": (bert, "classify")}
"""A model and its task."""


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model of a family with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family][0](**changes).to(dtype)
    model.save_pretrained(folder)
    return folder


def batch(rows: int = 3, tokens: int = 20) -> dict[str, Tensor]:
    """Return rows of tokens, the later ones shorter."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, NUM_TOKENS, (rows, tokens), generator=generator)
    mask = (torch.arange(tokens) < tokens - torch.arange(rows)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
