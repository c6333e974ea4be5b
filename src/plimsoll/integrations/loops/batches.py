"""Functions that infer the units of a Hugging Face batch, and join the outputs of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from plimsoll.data.batch import Units
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.integrations.loops.collected_outputs import concatenated
from plimsoll.step.losses.known import shifts_labels


def units_of(inputs: Any, model: nn.Module) -> Units:
    """Return the units that the mean loss of a Hugging Face model averages over, inferred from labels and loss."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return "samples"
    return "next-tokens" if shifts_labels(model) else "tokens"


def joined(
    found: list[tuple[Any, Any, Any]], counts: Sequence[float], pool: MappedPool | None = None
) -> tuple[Any, Any, Any]:
    """Join the loss, the logits and the labels of micro-batches.

    Args:
        found: loss, logits and labels of each micro-batch.
        counts: the number of units in each micro-batch, by which its loss is weighted.
        pool: the pool of memory-mapped files for the joined logits and labels; ``None`` keeps these on their device.
    """
    if len(found) == 1:
        return found[0]
    losses, logits, labels = zip(*found, strict=True)
    loss = None
    if losses[0] is not None:
        total = sum(counts) or 1
        loss = sum(one.mean() * count / total for one, count in zip(losses, counts, strict=True) if count)
    return loss, concatenated(logits, pool=pool), concatenated(labels, pool=pool)
