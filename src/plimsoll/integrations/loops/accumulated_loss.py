"""A Trainer's loss and ``num_items_in_batch``: what it divides by it, and the loss of a micro-batch.

A Trainer that hands ``num_items_in_batch`` to a model leaves it to the model to divide by it. A model that takes it and
means over its own batch (classifiers of texts and tokens, masked language models and T5 in transformers 5.23, and many
a ``compute_loss`` of a subclass) has a loss and gradients that are as many times too large as a window has batches.

Does NOT cover a subclass with a ``training_step`` of its own, and a ``compute_loss_func``, which say themselves what
they divide by; a loss of NaN; and a loss that cannot be computed in evaluation mode without gradients, or is random
there: nothing is said of those. A ``compute_loss`` that counts its calls counts two more.
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

_LEAST_SHARE, _ALL = 1e-4, 0.02  # of a loss: what rounding may be, and what is taken for the whole of it


def warn_if_undivided(
    trainer: transformers.Trainer, model: nn.Module, batch: Any, items: Any, backend: Backend
) -> None:
    """Warn if the loss, or a part of it, is the same whatever it is to be divided by, which two passes show.

    Args:
        trainer: before its first step.
        model: as the trainer calls it; it is afterwards as it was.
        batch: its first; the passes are of one sample of it, where it can be cut.
        items: what the trainer would have the loss divided by; ``None`` if it divides by itself.
        backend: of the device, whose random numbers stay as they are.
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
    if isinstance(losses, str):  # the step itself fails, or can do what these passes cannot
        backend.release()
        return
    first, second = losses
    if not first or not math.isfinite(first) or not math.isfinite(second):
        return
    undivided = (2 * second - first) / first  # the share of the loss that stays when the divisor is doubled
    if abs(undivided) > _LEAST_SHARE and abs(undivided - 1) > _ALL:
        warnings.warn(
            f"{undivided:.1%} of the loss of this {type(trainer.model).__name__} does not depend on num_items_in_batch "
            "and the rest is divided by it. Where that part is a mean of its own batch (a router's balance, a term of "
            f"compute_loss), it counts {num_batches} times in the loss that is logged and in the gradients with "
            f"gradient_accumulation_steps={num_batches}: divide it by {num_batches} in compute_loss, or set the "
            "router's coefficient so much lower",
            PlimsollWarning,
            stacklevel=2,
        )
    elif abs(undivided - 1) <= _ALL:
        warnings.warn(
            f"the loss of this {type(trainer.model).__name__} does not depend on num_items_in_batch, by which the "
            "Trainer takes it to be divided. If it is the mean of its own batch, the loss that is logged and the "
            f"gradients are {num_batches} times too large with gradient_accumulation_steps={num_batches}: set "
            "trainer.loss_is_scaled_for_ga = False before it trains; True if it is divided by the accumulation itself",
            PlimsollWarning,
            stacklevel=2,
        )


def loss_of_micro_batch(
    trainer: transformers.Trainer, model: nn.Module, items: Any, micro_batch: Any, share: float
) -> Tensor:
    """Compute the loss of a micro-batch as the trainer's step would, if there were only its items."""
    with trainer.compute_loss_context_manager():
        inputs = trainer._prepare_inputs(copy.copy(micro_batch))
        loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=None if items is None else items * share)
        found: Tensor = loss
        return found


def adds_nothing(trainer: transformers.Trainer) -> bool:
    """Whether a trainer's steps have the loss that its model computes, and no other; ask before anything is wrapped."""
    methods = {name: getattr(trainer, name) for name in ("compute_loss", "training_step", "prediction_step")}
    return (
        all(getattr(one, "__func__", None) is getattr(transformers.Trainer, name) for name, one in methods.items())
        and all(map(is_of_library, methods.values()))
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
    )


def is_known_for(known: Units | None, units: Units | None, batch: Any, model: nn.Module) -> bool:
    """Whether the loss of a batch is additive, where it is ``known`` what the model's own averages over."""
    averaged = units or units_of(batch, model)
    return known == averaged and is_usual(batch, Workload(model, _never_steps(), model_loss, averaged))


def loss_check_of_trainer(
    trainer: transformers.Trainer, optimizer: torch.optim.Optimizer, units: Units, batch: Any, cuts: Mapping[str, bool]
) -> LossCheck:
    """Find out whether a trainer's own loss may be computed in parts; ``cuts`` is what the user has said of that."""
    model, computed = trainer.model, trainer.compute_loss
    assert model is not None
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    loss_of = partial(loss_of_micro_batch, trainer, model, items)
    workload = Workload(model, optimizer, cast(Any, computed), units, device=trainer.args.device)
    backend = backend_for(str(trainer.args.device))
    return loss_check_of(workload, batch, backend, cuts["recut_loss"], cuts["never_cut"], loss_of)


class EvaluatedLoss:
    """Says whether the loss of a trainer's evaluations may be computed in parts; see `plimsoll.step.losses.additive`.

    Args:
        trainer: the trainer.
        units: what its loss averages over, where the user has said it.
        units_of: counts that.
        cuts: what the user has said of cuts.
        backend: of its device.
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
        """Return why a batch must not be cut, if it must not; ``loss_of`` computes what the evaluation does."""
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
    """Return where the loss of a trainer may keep something: in a subclass, or in what a function closes over."""
    return {"trainer": trainer, "compute_loss_func": trainer.compute_loss_func}


def _never_steps() -> torch.optim.Optimizer:
    """An optimizer for a workload whose loss alone is asked."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


@torch.no_grad()
def _losses(
    trainer: transformers.Trainer, model: nn.Module, batch: Any, items: Any, backend: Backend
) -> tuple[float, float]:
    """The loss of a sample as it is to be divided by ``items``, and by twice as much."""
    sample = split_batch(batch, 1)[0] if shape_of_any(batch, "samples").num_samples > 1 else batch

    def loss(divisor: Any) -> float:
        with left_alone({"model": model, **roots_of(trainer)}, backend, sample):
            model.eval()
            return float(loss_of_micro_batch(trainer, model, divisor, sample, 1))

    return loss(items), loss(2 * items)
