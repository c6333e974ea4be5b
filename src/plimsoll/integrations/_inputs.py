"""What a Hugging Face model's batches and outputs are, for taking them apart and putting them together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.workload import Units


def units_of(inputs: Any, model: nn.Module) -> Units:
    """What the mean loss of a Hugging Face model averages over, as its labels show it."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return "samples"
    name = type(getattr(model, "get_base_model", lambda: model)()).__name__
    return "next-tokens" if name.endswith(("ForCausalLM", "LMHeadModel")) else "tokens"


def only_loss(found: Any) -> Tensor:
    """Return the loss of what `compute_loss` returned, which may have the outputs beside it."""
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def joined(found: list[tuple[Any, Any, Any]], counts: list[int]) -> tuple[Any, Any, Any]:
    """Put the loss, the logits and the labels of pieces together."""
    if len(found) == 1:
        return found[0]
    losses, logits, labels = zip(*found, strict=True)
    loss = None
    if losses[0] is not None:
        total = sum(counts) or 1
        loss = sum(one.mean() * count / total for one, count in zip(losses, counts, strict=True) if count)
    return loss, _concatenated(logits), _concatenated(labels)


def _concatenated(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, tuple | list):
        return type(first)(_concatenated(one) for one in zip(*parts, strict=True))
    if isinstance(first, dict):
        return type(first)({name: _concatenated(tuple(part[name] for part in parts)) for name in first})
    return first
