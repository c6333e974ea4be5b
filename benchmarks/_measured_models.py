"""The models of the measured runs, with their configurations from the Hugging Face hub, for transformers 4.51.3.

They are written out because a prediction must not need the hub. Layers, widths and dropouts equal those in the hub's
config.json; the number of parameters is checked.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

_GPT2 = ("GPT2LMHeadModel", "GPT2Config")
_CEREBRAS = {
    "n_positions": 2048, "n_embd": 768, "n_layer": 10, "n_head": 12, "n_inner": 3072, "activation_function": "gelu",
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_NEO = {
    "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 768, "num_layers": 12, "num_heads": 12,
    "attention_types": [[["global", "local"], 6]], "intermediate_size": None, "window_size": 256,
    "activation_function": "gelu_new", "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_OPT = {
    "vocab_size": 50272, "max_position_embeddings": 2048, "activation_function": "relu", "dropout": 0.1,
    "attention_dropout": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": 32128, "d_kv": 64, "feed_forward_proj": "relu", "dropout_rate": 0.1, "decoder_start_token_id": 0,
}  # fmt: skip

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "EleutherAI/gpt-neo-125M": ("GPTNeoForCausalLM", "GPTNeoConfig", _NEO),
    "facebook/opt-125m": (
        "OPTForCausalLM", "OPTConfig",
        _OPT | {"hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "num_attention_heads": 12,
                "word_embed_proj_dim": 768, "do_layer_norm_before": True},
    ),
    "facebook/opt-350m": (
        "OPTForCausalLM", "OPTConfig",
        _OPT | {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16,
                "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "cerebras/Cerebras-GPT-111M": (*_GPT2, _CEREBRAS),
    "openai-community/gpt2": (*_GPT2, {}),
    "distilbert/distilgpt2": (*_GPT2, {"n_layer": 6}),
    "T5-small": (
        "T5ForConditionalGeneration", "T5Config",
        _T5 | {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    ),
    "t5-base": (
        "T5ForConditionalGeneration", "T5Config",
        _T5 | {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
    "Qwen/Qwen3-4B": (
        "Qwen3ForCausalLM", "Qwen3Config",
        {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2ForCausalLM", "Qwen2Config",
        {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
         "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
    "google/gemma-2-2b-it": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        "LlamaForCausalLM", "LlamaConfig",
        {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
         "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
}  # fmt: skip

# The meaning of `attn_implementation=None` in 4.51.3: its T5 and GPT-Neo have no SDPA, and Gemma 2 trains eagerly.
_EAGER = ("EleutherAI/gpt-neo", "T5", "t5", "google/gemma-2")
# Special tokens that the tokenizer adds: OPT a </s> before the text, T5 a </s> after it, the others a start token.
_ADDED_TOKENS = {"facebook/opt": 1, "T5": 1, "t5": 1, "meta-llama": 1, "google/gemma": 1}
# Tokenized with ``padding=True``: a thousand texts are padded together, so that every row has 128 tokens.
_PADDED_BEFORE = ("EleutherAI/pythia", "deepseek-ai", "Qwen")


def build(name: str) -> nn.Module:
    """Return the model with random weights, in training mode, as ``AutoModelForX.from_config`` does."""
    model_class, config_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = "eager" if name.startswith(_EAGER) else "sdpa"
    model: nn.Module = getattr(transformers, model_class)(config)
    return model.train()


def added_tokens(name: str) -> int:
    return next((number for prefix, number in _ADDED_TOKENS.items() if name.startswith(prefix)), 0)


def is_padded_before(name: str) -> bool:
    return name.startswith(_PADDED_BEFORE)
