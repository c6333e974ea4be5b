"""Small checkpoints of many architectures, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
LLAMA = {**SIZES, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100}),
    "gpt2-base": ("GPT2Model", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-classifier": ("LlamaForSequenceClassification", "LlamaConfig", LLAMA),
    "bert": ("BertForSequenceClassification", "BertConfig", SIZES),
    "bert-masked": ("BertForMaskedLM", "BertConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SIZES),
    "distilbert": (
        "DistilBertForTokenClassification",
        "DistilBertConfig",
        {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 64, "d_kv": 16, "vocab_size": 100},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}),
}
"""Plain, tied, prefixed and fused weights, encoders and decoders, heads of every kind."""


def model_of(name: str, **fields: Any) -> PreTrainedModel:
    """Build a model with new weights; norms and biases are random too, so that no two are equal."""
    class_name, config_name, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**own, **fields})
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model.eval()


def saved(name: str, folder: Path, shard: str = "40KB", **fields: Any) -> PreTrainedModel:
    """Save a model in shards, and return it."""
    model = model_of(name, **fields)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def save_as_bin(model: PreTrainedModel, folder: Path) -> None:
    """Save a model in transformers' format before safetensors: tied weights appear twice and share their bytes."""
    folder.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
