"""The loss of a Trainer for a model that stands in for its own, as a plan's copy without memory does.

It is what ``compute_loss`` returns: of a subclass, of ``compute_loss_func``, of label smoothing. A module of the
trainer's that has the model in it, as the losses of sentence-transformers do, has the other one for as long.
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
        fields: what its batches have beside tensors.
        items: what the trainer would have the loss divided by.
        model: in place of the trainer's.
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
    """A module, or a dict of them, with another one in the place of a model; itself where the model is not in it.

    It is a copy, since its backward pass may call the model again (as those with cached gradients do).
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
