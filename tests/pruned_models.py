"""Small models of many architectures for compression, and batches for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPS = SIZES | ENDS | {"num_key_value_heads": 2}

# The class that builds a model, and the fields of its configuration.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", SIZES),
    "bert-masked": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForSequenceClassification", SIZES),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 32},
    ),
    "electra": ("ElectraForSequenceClassification", SIZES | {"embedding_size": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32, **ENDS},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZES | ENDS),
    "opt": (
        "OPTForCausalLM",
        {name: size for name, size in SIZES.items() if name != "intermediate_size"}
        | ENDS
        | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    ),
    "llama": ("LlamaForCausalLM", GROUPS | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", GROUPS),
    "mistral": ("MistralForCausalLM", GROUPS),
    "gemma": ("GemmaForCausalLM", GROUPS | {"head_dim": 4}),
    "phi": ("PhiForCausalLM", SIZES | ENDS),
    "phi3": ("Phi3ForCausalLM", GROUPS),
}


def small_model(name: str, device: str = "cpu", **fields: Any) -> Any:
    """Build a seeded model in evaluation mode, with biases and norms unlike a new model's."""
    import transformers

    class_name, sizes = ARCHITECTURES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(model_class.config_class(**sizes | fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 and device != "meta":
            parameter.data.normal_(0.5, 0.5)
    return model


def batches_of(model: nn.Module, num_batches: int = 2, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield batches as in a training, with padding at the end of the first row."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        ids = torch.randint(3, 40, (3, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        is_classifier = "Classification" in type(model).__name__
        labels = torch.randint(0, 2, (3,), generator=generator) if is_classifier else ids
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def logits_of(model: nn.Module) -> Tensor:
    """Return the logits of one batch."""
    with torch.no_grad():
        return model(**next(batches_of(model, seed=1))).logits


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def num_weights(model: nn.Module) -> int:
    """Return the number of weights of a model; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
