"""What a Hugging Face model's batches and outputs are, for cutting them and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from plimsoll.data.batch import Units
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.integrations.loops.collected_outputs import concatenated
from plimsoll.step.losses.known import shifts_labels


def units_of(inputs: Any, model: nn.Module) -> Units:
    """What the mean loss of a Hugging Face model averages over, as its labels and its loss show it."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return "samples"
    return "next-tokens" if shifts_labels(model) else "tokens"


def joined(
    found: list[tuple[Any, Any, Any]], counts: Sequence[float], pool: MappedPool | None = None
) -> tuple[Any, Any, Any]:
    """Join the loss, the logits and the labels of micro-batches, in a pool or on their device."""
    if len(found) == 1:
        return found[0]
    losses, logits, labels = zip(*found, strict=True)
    loss = None
    if losses[0] is not None:
        total = sum(counts) or 1
        loss = sum(one.mean() * count / total for one, count in zip(losses, counts, strict=True) if count)
    return loss, concatenated(logits, pool=pool), concatenated(labels, pool=pool)
