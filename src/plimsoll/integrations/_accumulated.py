"""A loss that a `Trainer` takes to be divided by the labels of its whole window of batches, and that is not.

A Trainer that hands ``num_items_in_batch`` to a model leaves it to the model to divide by it. A model that takes it and
means over its own batch (the sequence classifiers of transformers 5.23, and many a ``compute_loss`` of a subclass) has
a loss and gradients that are as many times too large as a window has batches: 8 times for a batch of 8 as 8 x 1.

Does NOT cover a subclass with a ``training_step`` of its own, and a ``compute_loss_func``, which say themselves what
they divide by.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import transformers
from torch import nn

from plimsoll.device.base import Backend
from plimsoll.integrations.transaction import shape_of_any
from plimsoll.run.boundary import Position, attempt
from plimsoll.workload import split_batch


def warn_if_undivided(
    trainer: transformers.Trainer, model: nn.Module, batch: Any, items: Any, backend: Backend
) -> None:
    """Warn if the loss is the same whatever it is to be divided by, which two passes without gradients show.

    Args:
        trainer: before its first step.
        model: as the trainer calls it.
        batch: its first; the passes are of one sample of it, where it can be cut.
        items: what the trainer would have the loss divided by; ``None`` if it divides by itself.
        backend: of the device, whose random numbers stay as they are.
    """
    num_batches = trainer.args.gradient_accumulation_steps
    leaves_it_to_the_model = (
        trainer.model_accepts_loss_kwargs
        and trainer.loss_is_scaled_for_ga is None
        and trainer.compute_loss_func is None
        and type(trainer).training_step is transformers.Trainer.training_step
    )
    if num_batches == 1 or items is None or not leaves_it_to_the_model:
        return
    sample = split_batch(batch, 1)[0] if shape_of_any(batch, "samples").num_samples > 1 else batch
    random_state = backend.random_state()
    losses = attempt(lambda: [_loss(trainer, model, sample, times * items) for times in (1, 2)], backend, Position())
    backend.restore_random_state(random_state)
    if isinstance(losses, list) and losses[0] and math.isclose(*losses, rel_tol=0.01):
        warnings.warn(
            f"the loss of {type(trainer.model).__name__} does not depend on num_items_in_batch, by which the Trainer "
            f"takes it to be divided: with gradient_accumulation_steps={num_batches} the loss that is logged and the "
            f"gradients are {num_batches} times too large; set trainer.loss_is_scaled_for_ga = False before it trains",
            stacklevel=2,
        )


@torch.no_grad()
def _loss(trainer: transformers.Trainer, model: nn.Module, sample: Any, items: Any) -> float:
    model.eval()  # the trainer's step begins with train()
    inputs = trainer._prepare_inputs(copy.copy(sample))
    with trainer.compute_loss_context_manager():
        loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=items)
    return float(loss)
