"""Small students and teachers, and plain distillation: both models and all their logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.models.recurrent.model import build_recurrent

VOCABULARY, LENGTH, SAMPLES, LABELS = 50, 9, 6, 3
KINDS = ("gpt2", "lstm", "bert classifier", "lstm classifier")


def task_of(kind: str) -> Any:
    return "classification" if "classifier" in kind else "language-modeling"


def model_of(kind: str, seed: int, width: int = 16, layers: int = 2, **fields: Any) -> nn.Module:
    """Build a model with large weights, so that distributions differ; without dropout, so that any split draws the
    same.
    """
    torch.manual_seed(seed)
    model = _made(kind, width, layers, fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def _made(kind: str, width: int, layers: int, fields: dict[str, Any]) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    if kind == "gpt2":
        ends = {"bos_token_id": 1, "eos_token_id": 1}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(
            **ids | {"n_embd": width, "n_layer": layers, "n_head": 2, "n_positions": 32} | ends | no_dropout | fields
        )
        config.use_cache = False
        return GPT2LMHeadModel(config)
    if kind == "bert classifier":
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        more = {"num_labels": LABELS, "max_position_embeddings": 32}
        return BertForSequenceClassification(BertConfig(**ids | sizes | no_dropout | more | fields))
    labels = LABELS if "classifier" in kind else None
    sizes = {"embedding_size": width, "hidden_size": width, "num_layers": layers, "num_labels": labels}
    return build_recurrent({"architecture": "lstm", "vocab_size": VOCABULARY} | sizes | fields)


def batch_of(kind: str) -> dict[str, Tensor]:
    """Return samples of unequal length, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[4, 2:] = 0
    fields = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    if task_of(kind) == "classification":
        labels = torch.randint(LABELS, (SAMPLES,), generator=generator)
    return fields | {"labels": labels}


def plain_loss(
    student: nn.Module, teacher: nn.Module, batch: dict[str, Tensor], task: str, temperature: float, hard: float
) -> Tensor:
    """Compute the loss from whole logits of both models, with torch functions."""
    fields = {name: value for name, value in batch.items() if name != "labels"}
    own, labels = student(**fields).logits, batch["labels"]
    with torch.no_grad():
        other = teacher(**fields).logits
    if task == "language-modeling":
        counted = labels[:, 1:] != -100
        own, other, labels = own[:, :-1][counted], other[:, :-1][counted], labels[:, 1:][counted]
    own, other = own.to(torch.promote_types(own.dtype, torch.float32)), other.to(own.dtype)
    soft = functional.kl_div(
        functional.log_softmax(own / temperature, dim=-1), functional.softmax(other / temperature, dim=-1),
        reduction="batchmean",
    )  # fmt: skip
    return hard * functional.cross_entropy(own, labels) + (1 - hard) * temperature**2 * soft


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def largest_difference(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor's elements, relative to its largest element (or to 1e-3)."""
    assert expected.keys() == got.keys()
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)) for name, value in expected.items()
    )
