"""Checks of a Trainer's loss: whether it divides by ``num_items_in_batch``, and whether a batch may be split.

A Trainer that passes ``num_items_in_batch`` to a model relies on the model to divide by it. Some models accept it but
average over their batch: classifiers of texts and tokens, masked language models and T5 in transformers 5.23, and
``compute_loss`` of many subclasses. Their loss and gradients are then multiplied by the number of batches that are
accumulated for one update.

Trainers with a ``compute_loss_func`` or a ``training_step`` of a subclass are not checked, because these divide the
loss themselves. Nor is a loss that is NaN, is random, or fails in evaluation mode without gradients. The check calls
``compute_loss`` twice, so code in it that counts calls counts two more.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from plimsoll.data.batch import Units, split_batch
from plimsoll.device.base import Backend, backend_for
from plimsoll.errors import PlimsollWarning
from plimsoll.integrations.loops.batches import units_of
from plimsoll.models.workload import Reason, Workload, model_loss
from plimsoll.records.plan import LossCheck
from plimsoll.step.losses.additive import Additivity, LossOf, loss_check_of
from plimsoll.step.losses.known import is_of_library, is_usual, known_units
from plimsoll.step.micro_batches import shape_of_any
from plimsoll.step.oom_boundary import Position, without_fail
from plimsoll.step.undo.step_state import left_alone

_LEAST_SHARE, _ALL = 1e-4, 0.02  # tolerances, as shares of a loss: for rounding, and for a loss that is not divided


def warn_if_undivided(
    trainer: transformers.Trainer, model: nn.Module, batch: Any, items: Any, backend: Backend
) -> None:
    """Warn if two passes of one sample with different divisors show that a part of the loss is not divided.

    Args:
        trainer: the trainer, before its first step.
        model: the model as the trainer calls it; its state is restored.
        batch: the first batch. The passes use one of its samples, or the whole batch if it cannot be split.
        items: ``num_items_in_batch``, the divisor of the loss; ``None`` if the trainer passes none.
        backend: backend of the device; its random state is restored.
    """
    num_batches = trainer.args.gradient_accumulation_steps
    leaves_it_to_the_model = (
        trainer.model_accepts_loss_kwargs
        and getattr(trainer, "loss_is_scaled_for_ga", True) is None  # before transformers 5.23 there is no such switch
        and trainer.compute_loss_func is None
        and type(trainer).training_step is transformers.Trainer.training_step
    )
    if num_batches == 1 or items is None or not leaves_it_to_the_model:
        return
    losses = without_fail(lambda: _losses(trainer, model, batch, items, backend))
    if isinstance(losses, str):  # an error; the step itself reports it, or does not have it
        backend.release()
        return
    first, second = losses
    if not first or not math.isfinite(first) or not math.isfinite(second):
        return
    undivided = (2 * second - first) / first  # the share of the loss that stays when the divisor is doubled
    if abs(undivided) > _LEAST_SHARE and abs(undivided - 1) > _ALL:
        warnings.warn(
            f"{undivided:.1%} of the loss of this {type(trainer.model).__name__} does not depend on num_items_in_batch "
            "and the rest is divided by it. If that part is a mean over its batch (a router's balance, a term of "
            f"compute_loss), it counts {num_batches} times in the logged loss and in the gradients with "
            f"gradient_accumulation_steps={num_batches}: divide it by {num_batches} in compute_loss, or divide the "
            f"router's coefficient by {num_batches}",
            PlimsollWarning,
            stacklevel=2,
        )
    elif abs(undivided - 1) <= _ALL:
        warnings.warn(
            f"the loss of this {type(trainer.model).__name__} does not depend on num_items_in_batch, but the Trainer "
            "expects it to be divided by it. If it is a mean over its batch, the logged loss and the gradients are "
            f"{num_batches} times too large with gradient_accumulation_steps={num_batches}: set "
            "trainer.loss_is_scaled_for_ga = False before training, or True if the loss is divided by the number of "
            "accumulated batches already",
            PlimsollWarning,
            stacklevel=2,
        )


def loss_of_micro_batch(
    trainer: transformers.Trainer, model: nn.Module, items: Any, micro_batch: Any, share: float
) -> Tensor:
    """Compute the loss of a micro-batch as the step of the trainer would.

    Args:
        trainer: the trainer.
        model: the model as the trainer calls it.
        items: the ``num_items_in_batch`` of the whole batch; ``None`` if the trainer passes none.
        micro_batch: the micro-batch.
        share: the share of the items that are in the micro-batch, from 0 to 1.
    """
    with trainer.compute_loss_context_manager():
        inputs = trainer._prepare_inputs(copy.copy(micro_batch))
        loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=None if items is None else items * share)
        found: Tensor = loss
        return found


def adds_nothing(trainer: transformers.Trainer) -> bool:
    """Return whether a trainer uses the loss of its model unchanged. Call this before its methods are wrapped."""
    methods = {name: getattr(trainer, name) for name in ("compute_loss", "training_step", "prediction_step")}
    return (
        all(getattr(one, "__func__", None) is getattr(transformers.Trainer, name) for name, one in methods.items())
        and all(map(is_of_library, methods.values()))
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
    )


def is_known_for(known: Units | None, units: Units | None, batch: Any, model: nn.Module) -> bool:
    """Return whether the loss of a batch is known to be the weighted sum of the losses of its parts.

    Args:
        known: the units that the loss of the model averages over; ``None`` if they are not known.
        units: the units given by the user; ``None`` if the user gave none.
        batch: the batch.
        model: the model.
    """
    averaged = units or units_of(batch, model)
    return known == averaged and is_usual(batch, Workload(model, _never_steps(), model_loss, averaged))


def loss_check_of_trainer(
    trainer: transformers.Trainer, optimizer: torch.optim.Optimizer, units: Units, batch: Any, cuts: Mapping[str, bool]
) -> LossCheck:
    """Check whether the loss of a trainer is additive, so that its batches may be split.

    Args:
        trainer: the trainer.
        optimizer: its optimizer.
        units: the loss normalizer.
        batch: a batch.
        cuts: the options ``recut_loss`` and ``never_cut`` of the user.
    """
    model, computed = trainer.model, trainer.compute_loss
    assert model is not None
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    loss_of = partial(loss_of_micro_batch, trainer, model, items)
    workload = Workload(model, optimizer, cast(Any, computed), units, device=trainer.args.device)
    backend = backend_for(str(trainer.args.device))
    return loss_check_of(workload, batch, backend, cuts["recut_loss"], cuts["never_cut"], loss_of)


class EvaluatedLoss:
    """The check whether batches of a trainer's evaluations may be split (see `plimsoll.step.losses.additive`).

    Args:
        trainer: the trainer.
        units: the loss normalizer given by the user; ``None`` if the user gave none.
        units_of: returns the number of units in a batch.
        cuts: the options ``recut_loss`` and ``never_cut`` of the user.
        backend: backend of the device.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        units: Units | None,
        units_of: Units,
        cuts: Mapping[str, bool],
        backend: Backend,
    ) -> None:
        self._trainer, self._units, self._units_of = trainer, units, units_of
        self._cuts, self._backend = cuts, backend
        self._known = known_units(trainer.model) if trainer.model is not None and adds_nothing(trainer) else None
        self._additivity: Additivity | None = None

    @torch.no_grad()
    def why_whole(self, batch: Any, loss_of: LossOf) -> Reason | None:
        """Return the reason why a batch must not be split; ``None`` if it may be split.

        Args:
            batch: the batch.
            loss_of: computes the loss of a micro-batch as the evaluation does.
        """
        trainer, model = self._trainer, self._trainer.model
        assert model is not None
        if self._additivity is None:
            computed: Any = trainer.compute_loss
            workload = Workload(model, _never_steps(), computed, self._units_of, device=trainer.args.device)
            position = Position(trainer.state.global_step, "evaluation")
            said = self._cuts["recut_loss"], self._cuts["never_cut"]
            self._additivity = Additivity(workload, self._backend, position, *said, roots=roots_of(trainer))
        self._additivity.is_known = is_known_for(self._known, self._units, batch, model)
        return self._additivity.before_cut(batch, loss_of)


def roots_of(trainer: transformers.Trainer) -> dict[str, Any]:
    """Return the objects in which a trainer's loss may keep state, by name: the trainer and ``compute_loss_func``."""
    return {"trainer": trainer, "compute_loss_func": trainer.compute_loss_func}


def _never_steps() -> torch.optim.Optimizer:
    """Return an unused optimizer for a workload of which only the loss is used."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


@torch.no_grad()
def _losses(
    trainer: transformers.Trainer, model: nn.Module, batch: Any, items: Any, backend: Backend
) -> tuple[float, float]:
    """Return the loss of a sample with the divisor ``items``, and with twice that divisor."""
    sample = split_batch(batch, 1)[0] if shape_of_any(batch, "samples").num_samples > 1 else batch

    def loss(divisor: Any) -> float:
        with left_alone({"model": model, **roots_of(trainer)}, backend, sample):
            model.eval()
            return float(loss_of_micro_batch(trainer, model, divisor, sample, 1))

    return loss(items), loss(2 * items)
