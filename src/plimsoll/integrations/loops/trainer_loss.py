"""The loss of a Trainer for another model, such as the fake copy of its model in a dry run.

The loss is computed by the trainer's ``compute_loss``, so overrides in subclasses, ``compute_loss_func`` and label
smoothing apply. Modules of the trainer that contain the model, such as the losses of sentence-transformers, are
temporarily replaced by copies that contain the other model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn

from plimsoll.integrations.loops.attributes import attributes


def loss_of(
    trainer: transformers.Trainer, fields: Mapping[str, Any], items: Any, model: nn.Module, batch: Any
) -> Tensor:
    """Compute the loss of a batch.

    Args:
        trainer: the trainer.
        fields: the fields of the trainer's batches that are not tensors.
        items: ``num_items_in_batch``, the divisor of the loss; ``None`` if the trainer passes none.
        model: the model to use instead of the trainer's own model.
        batch: the tensors of a batch.
    """
    holders = {
        name: _holding(value, trainer.model, model)
        for name, value in vars(trainer).items()
        if value is not trainer.model
    }
    with attributes(trainer, holders):
        loss: Any = trainer.compute_loss(model, {**fields, **batch}, num_items_in_batch=items)
    return loss  # type: ignore[no-any-return]


def _holding(value: Any, model: nn.Module | None, other: nn.Module) -> Any:
    """Return a copy of a module or dict of modules in which ``other`` replaces ``model``.

    If ``value`` does not contain ``model``, ``value`` itself is returned.

    The original is not changed. So a backward pass that calls the module again later, as with cached gradients, still
    calls ``other``.
    """
    if value is model:
        return other
    if isinstance(value, dict):
        items = {name: _holding(one, model, other) for name, one in value.items()}
        return items if any(items[name] is not one for name, one in value.items()) else value
    if not isinstance(value, nn.Module):
        return value
    children = {name: _holding(child, model, other) for name, child in value.named_children()}
    if all(children[name] is child for name, child in value.named_children()):
        return value
    copied = copy.copy(value)
    copied._modules = {**value._modules, **children}
    return copied
