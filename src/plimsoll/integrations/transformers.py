"""The adapter for Hugging Face's `Trainer`: its steps recover when memory runs out, and train each sample once.

    trainer = transformers.Trainer(model, args, train_dataset=dataset)
    plimsoll.transformers.fit(trainer, budget="8GiB")        # in place of trainer.train()

The trainer keeps its loop, loss, accumulation, logs, callbacks, schedules and checkpoints. Not handled:

- several processes or devices (use `plimsoll train --nproc`), DeepSpeed, and optimizers that update inside backward:
  they are refused;
- recovery if memory runs out while the next batch is collated, or in a callback: an error names the operation;
- changes by ``training_step`` or ``compute_loss`` of a subclass to anything except gradients, buffers and random
  numbers: both run for each micro-batch, and again on each retry.

Written for transformers 5.23 (https://huggingface.co/docs/transformers/main_classes/trainer). It is checked that a
trainer has the methods used here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from transformers.trainer_utils import TrainOutput

from plimsoll.data.batch import Units, count_units
from plimsoll.device.base import Backend, backend_for
from plimsoll.errors import InputError
from plimsoll.integrations.loops.accelerated import put_back_of_scaler, stepped_as_now
from plimsoll.integrations.loops.accumulated_loss import (
    EvaluatedLoss,
    adds_nothing,
    is_known_for,
    loss_check_of_trainer,
    roots_of,
    warn_if_undivided,
)
from plimsoll.integrations.loops.attributes import attributes
from plimsoll.integrations.loops.batches import units_of
from plimsoll.integrations.loops.covered_errors import covered
from plimsoll.integrations.loops.evaluations import Evaluations
from plimsoll.integrations.loops.planned import planned, refuse_both
from plimsoll.integrations.loops.trainer_loss import loss_of
from plimsoll.integrations.loops.transaction import Transaction, techniques_for_loops
from plimsoll.integrations.training_arguments import to_training_arguments
from plimsoll.models.workload import Precision
from plimsoll.records.former import former_arguments
from plimsoll.records.plan import MICRO_BATCH, Choice, Configuration, Plan
from plimsoll.records.run import OomEvent
from plimsoll.records.units import parse_bytes
from plimsoll.step.fallbacks import samples_of
from plimsoll.step.losses.known import known_units
from plimsoll.step.micro_batches import shape_of_any
from plimsoll.step.undo.saved import Stateful
from plimsoll.techniques import technique_of

_NEEDED = (
    "training_step",
    "compute_loss",
    "prediction_step",
    "log",
    "get_train_dataloader",
    "_get_num_items_in_batch",
    "_clip_grad_norm",
)
_INSIDE_BACKWARD = ("lomo", "adalomo")

_Step = Callable[[nn.Module, Any, Any], Tensor]


@dataclass(slots=True)
class Protection:
    """The state of a protected trainer.

    Attributes:
        events: out-of-memory events that the trainer has recovered from.
        micro_batch: samples of the current micro-batch; ``None`` before the first step.
        plan: the plan for the budget; ``None`` without a budget.
    """

    events: list[OomEvent] = field(default_factory=list)
    micro_batch: int | None = None
    plan: Plan | None = None


@former_arguments(rungs="fallbacks")
def fit(
    trainer: transformers.Trainer,
    *train_arguments: Any,
    budget: str | int | None = None,
    units: Units | None = None,
    batch: Any = None,
    fallbacks: Sequence[Configuration | Sequence[Choice]] | None = None,
    recut_batch_norm: bool = False,
    recut_loss: bool = False,
    never_cut: bool = False,
    extra_state: Sequence[Stateful] = (),
    allow_hidden_state: bool = False,
    on_oom: Callable[[OomEvent], None] | None = None,
    **train_options: Any,
) -> TrainOutput:
    """Call ``trainer.train(...)``, and recover if memory runs out in a step.

    ``auto_find_batch_size`` is then not needed. It restarts the whole training with another batch size, but keeps the
    weights of the first attempt.

    Args:
        trainer: a `transformers.Trainer` or a subclass.
        train_arguments: positional arguments of ``trainer.train``.
        budget: device memory for the process, such as ``"8GiB"`` or a number of bytes. A plan is made for it, and it is
            enforced. ``None`` uses all available memory, without a plan.
        units: the loss normalizer if the trainer does not divide by ``num_items_in_batch``; by default inferred from
            the labels (see `plimsoll.data.batch.count_units`).
        batch: with ``budget``, the batch for which the plan is made, as the collator returns it. It should be the
            largest; by default the first batch.
        fallbacks: without a budget, the techniques to start with, then the fallbacks to change to when memory runs out,
            as for `plimsoll.TrainStep`. Techniques that change the loop, the precision or the optimizer are refused.
        recut_batch_norm: allow splitting a batch although BatchNorm's statistics then differ from the whole batch's.
        recut_loss: allow splitting a batch although its loss was not shown to be the sum of the losses of its parts.
        never_cut: keep every batch whole.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` whose state is restored when a step is undone.
        allow_hidden_state: retry after an out-of-memory error even if some state cannot be restored.
        on_oom: called with each out-of-memory event that is recovered from.
        train_options: keyword arguments of ``trainer.train``, such as ``resume_from_checkpoint=True``.

    Returns:
        The result of ``trainer.train``.

    Raises:
        OutOfMemoryError: if not even a single sample fits; the step is undone.
        BudgetError: if no plan fits the budget; the error names a budget that would suffice.
        InputError: if this trainer is not supported, or an argument is invalid.
    """
    with protected(
        trainer,
        budget=budget,
        units=units,
        batch=batch,
        fallbacks=fallbacks,
        recut_batch_norm=recut_batch_norm,
        recut_loss=recut_loss,
        never_cut=never_cut,
        extra_state=extra_state,
        allow_hidden_state=allow_hidden_state,
        on_oom=on_oom,
    ):
        return trainer.train(*train_arguments, **train_options)


@contextmanager
def protected(
    trainer: transformers.Trainer,
    *,
    budget: str | int | None = None,
    units: Units | None = None,
    batch: Any = None,
    fallbacks: Sequence[Configuration | Sequence[Choice]] | None = None,
    recut_batch_norm: bool = False,
    recut_loss: bool = False,
    never_cut: bool = False,
    extra_state: Sequence[Stateful] = (),
    allow_hidden_state: bool = False,
    on_oom: Callable[[OomEvent], None] | None = None,
) -> Iterator[Protection]:
    """Protect a trainer inside the block, for code that calls ``trainer.train`` or ``trainer.evaluate`` itself.

    The arguments are the same as for `fit`.
    """
    refuse_both(budget, batch, {"fallbacks": fallbacks})
    _refuse(trainer)
    with ExitStack() as stack:
        said = {
            "recut_batch_norm": recut_batch_norm, "recut_loss": recut_loss, "never_cut": never_cut,
            "extra_state": extra_state, "allow_hidden_state": allow_hidden_state,
        }  # fmt: skip
        guard = _Guard(trainer, units, fallbacks, said, on_oom)
        if budget is not None:
            sample = _first_batch(trainer, guard.backend) if batch is None else batch
            plan = guard.protection.plan = _planned(guard, budget, sample)
            guard.fallbacks = plan.fallbacks
            if guard.says_what_counts(sample):
                per_sample = shape_of_any(sample, "samples").elements_per_sample
                guard.evaluations.begin_with(samples_of(plan.choices) * per_sample)
            stack.enter_context(guard.backend.limited(parse_bytes(budget)))
        stack.enter_context(guard.at_work())
        yield guard.protection


def _refuse(trainer: transformers.Trainer) -> None:
    missing = [name for name in _NEEDED if not callable(getattr(trainer, name, None))]
    if missing:
        name = f"{type(trainer).__name__} has no {', '.join(missing)}, which this adapter needs"
        raise InputError(f"{name}: use transformers 5.23, or plimsoll.TrainStep in your own loop")
    arguments = trainer.args
    if arguments.n_gpu > 1:
        raise InputError(
            f"this trainer would use DataParallel on {arguments.n_gpu} GPUs, which gathers outputs and gradients on "
            "the first, so it runs out of memory while the others have plenty; set CUDA_VISIBLE_DEVICES=0, or train "
            "with one process per GPU (`plimsoll train --nproc`)"
        )
    if arguments.world_size > 1:
        raise InputError(
            f"this trainer is one of {arguments.world_size} processes, which wait for each other inside backward, so "
            "one process alone cannot repeat a step: train with one process, or use `plimsoll train --nproc`"
        )
    if arguments.deepspeed is not None:
        raise InputError(
            f"this trainer hands its steps to DeepSpeed ({arguments.deepspeed!r}), which cannot undo a step: leave "
            "deepspeed out"
        )
    if arguments.optim in _INSIDE_BACKWARD:
        name = getattr(arguments.optim, "value", arguments.optim)
        raise InputError(
            f"optim={name} updates the parameters inside backward, so a step cannot be undone: choose another "
            "optimizer, such as adafactor, whose states are also small"
        )


def _refuse_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, AcceleratedOptimizer) and not isinstance(optimizer.optimizer, LayerWiseDummyOptimizer):
        return
    name = type(getattr(optimizer, "optimizer", optimizer)).__name__
    raise InputError(
        f"the trainer's optimizer is a {name}, but it must be prepared by Accelerate and update in its step method: "
        "choose an optim that is not layer-wise"
    )


def _first_batch(trainer: transformers.Trainer, backend: Backend) -> Any:
    """Return the first batch of the training data set, which the trainer will read again."""
    if not isinstance(trainer.train_dataset, Sized):
        raise InputError(
            f"the train dataset, a {type(trainer.train_dataset).__name__}, has no length: it may be a stream, and "
            "planning would consume its first batch; give batch=, the largest batch of the training"
        )
    random_state = backend.random_state()
    sample = next(iter(trainer.get_train_dataloader()))
    backend.restore_random_state(random_state)
    return sample


def _planned(guard: _Guard, budget: str | int, sample: Any) -> Plan:
    """Return the plan with the fastest techniques that fit and that do not change the trainer's loop and optimizer."""
    trainer = guard.trainer
    model = trainer.model
    assert model is not None
    optimizer = trainer.optimizer or trainer.create_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    tensors = {name: value for name, value in sample.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in sample.items() if name not in tensors}
    items = trainer._get_num_items_in_batch([sample], trainer.args.device)
    return planned(
        model,
        optimizer,
        tensors,
        partial(loss_of, trainer, others, items),
        budget=budget,
        units=guard.units or units_of(sample, model),
        loss_check=loss_check_of_trainer(trainer, optimizer, guard.units_of, sample, guard.said),
        device=trainer.args.device,
        offered=_offered() - (frozenset() if guard.says_what_counts(sample) else {MICRO_BATCH}),
        clip_norm=trainer.args.max_grad_norm or None,
        precision=_precision_of(trainer),
    )


def _offered() -> frozenset[str]:
    """Return the names of the techniques that do not change a trainer's evaluation, loss, optimizer or precision."""
    return frozenset(name for name in techniques_for_loops(has_loss=True) if technique_of(name).is_for_trainers)


def _precision_of(trainer: transformers.Trainer) -> Precision:
    return "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"


class _Guard:
    """The protection of one trainer: it wraps the trainer's methods for training and evaluation."""

    def __init__(
        self,
        trainer: transformers.Trainer,
        units: Units | None,
        fallbacks: Sequence[Configuration | Sequence[Choice]] | None,
        said: dict[str, Any],
        on_oom: Callable[[OomEvent], None] | None,
    ) -> None:
        self.trainer, self.fallbacks = trainer, fallbacks
        self.backend = backend_for(str(trainer.args.device))
        self.protection = Protection()
        self.said, self.units, self._on_oom = said, units, on_oom
        self.adds_nothing = adds_nothing(trainer)
        self._training: _Training | None = None
        evaluated = EvaluatedLoss(trainer, units, self.units_of, said, self.backend)
        self.evaluations = Evaluations(
            trainer,
            self.backend,
            units_of=self.units_of,
            refuse_unclear=self.refuse_unclear,
            why_whole=evaluated.why_whole,
            note=self.note,
        )

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Wrap the methods of the trainer inside the block."""
        trainer = self.trainer
        wrapped = {
            "training_step": self._wrapped_step(trainer.training_step),
            "compute_loss": self._wrapped_loss(trainer.compute_loss),
            "log": self._wrapped_log(trainer.log),
            **self.evaluations.wrapped(),
            **covered(trainer, self.backend),
        }
        with attributes(trainer, wrapped):
            try:
                yield
            finally:
                if self._training is not None:
                    self._training.close()

    def units_of(self, batch: Any) -> float:
        """Return the number of units that the mean loss of a batch averages over.

        The kind of unit is the user's ``units`` or, if none were given, inferred from the labels.
        """
        if self.units is not None:
            return count_units(batch, self.units)
        assert self.trainer.model is not None
        return count_units(batch, units_of(batch, self.trainer.model))

    def says_what_counts(self, batch: Any) -> bool:
        """Return whether the number of loss units of a batch is known; otherwise the batch must not be split."""
        return self.units is not None or bool({"labels", *self.trainer.label_names} & set(batch))

    def refuse_unclear(self, batch: Any) -> None:
        """Raise if a batch must not be split because its number of loss units is unknown.

        Raises:
            InputError: if the batch has no labels, and no units were given.
        """
        if not self.says_what_counts(batch):
            raise InputError(
                f"memory ran out with a batch without labels (it has {', '.join(map(str, batch))}), so the weights of "
                'its micro-batches are unknown: give units="samples" if the loss is a mean over samples, or a function '
                "batch -> int"
            )

    def note(self, events: Iterable[OomEvent]) -> None:
        """Record out-of-memory events, and call ``on_oom`` with each of them."""
        for event in events:
            self.protection.events.append(event)
            if self._on_oom is not None:
                self._on_oom(event)

    # -- training ------------------------------------------------------------------------------------------------------

    def _wrapped_step(self, original: _Step) -> _Step:
        def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if self._training is None or not self._training.goes_on():
                if self._training is not None:
                    self._training.close()
                warn_if_undivided(self.trainer, model, inputs, num_items_in_batch, self.backend)
                self._training = _Training(self, original)
            return self._training.run(model, inputs, num_items_in_batch)

        return training_step

    def _wrapped_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compute_loss``, so that techniques apply to the loss of the trainer."""

        def compute_loss(model: nn.Module, inputs: Any, *arguments: Any, **options: Any) -> Any:
            if self.evaluations.items is not None and "num_items_in_batch" in options:
                options |= {"num_items_in_batch": self.evaluations.items}

            def computed(model: nn.Module, inputs: Any) -> Any:
                return original(model, inputs, *arguments, **options)

            if self._training is None or self._training.is_idle:
                return computed(model, inputs)
            return self._training.loss(computed, model, inputs)

        return compute_loss

    def _wrapped_log(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(logs: dict[str, float], *arguments: Any, **options: Any) -> None:
            if "loss" in logs and self._training is not None:
                num_ooms = {"plimsoll/oom": float(len(self.protection.events))}
                logs = logs | self._training.transaction.metrics() | num_ooms
            original(logs, *arguments, **options)

        return log


class _Training:
    """One call of ``trainer.train``: its transaction, and the wrapped methods of its optimizer and accelerator."""

    def __init__(self, guard: _Guard, original: _Step) -> None:
        trainer, self._guard, self._original = guard.trainer, guard, original
        optimizer = trainer.optimizer
        _refuse_optimizer(optimizer)
        assert isinstance(optimizer, AcceleratedOptimizer)
        assert trainer.model is not None
        self._trainer, self._optimizer, self._state = trainer, optimizer, trainer.state
        self._known = known_units(trainer.model) if guard.adds_nothing else None
        self.transaction = Transaction(
            trainer.model,
            optimizer.optimizer,
            units=guard.units_of,
            fallbacks=guard.fallbacks,
            **guard.said,
            remember=partial(put_back_of_scaler, trainer.accelerator, optimizer),
            loss=self._computed_loss,
            takes_any=True,
            roots=roots_of(trainer),
        )
        self.is_idle = True
        self._model: nn.Module = trainer.model
        self._compute_loss: Callable[[nn.Module, Any], Any] = trainer.compute_loss
        self._share, self._num_backward = 1.0, 0
        self._noted: list[Tensor] | None = None  # losses of a pass without backward
        self._wrapped = ExitStack()
        self._wrapped.callback(self.transaction.close)
        self._wrapped.enter_context(attributes(optimizer, {"step": self._wrapped_update(optimizer.step)}))
        backward = self._wrapped_backward(trainer.accelerator.backward)
        self._wrapped.enter_context(attributes(trainer.accelerator, {"backward": backward}))

    def goes_on(self) -> bool:
        """Return whether the trainer is still in the same call of ``train``."""
        return self._state is self._trainer.state

    def close(self) -> None:
        """Restore the original methods, and remove the techniques from the model."""
        self._wrapped.close()

    def run(self, model: nn.Module, inputs: Any, items: Any) -> Tensor:
        """Accumulate the gradients of a batch, and return its loss, as ``training_step`` does."""
        self._model = model
        self.transaction.position.step = self._trainer.state.global_step
        try:
            is_known = is_known_for(self._known, self._guard.units, inputs, self._model)
            self.transaction.additivity.is_known = is_known
            loss_of = partial(self._loss_of, self._trainer, model, items)
            self.transaction.run(inputs, partial(self._one_pass, model, items), None, loss_of)
        finally:
            self.is_idle, self._share = True, 1.0
            self._guard.note(self.transaction.events)
        self._guard.protection.micro_batch = self.transaction.micro_batch
        return self.transaction.loss

    def _one_pass(self, model: nn.Module, items: Any, micro_batch: Any, share: float) -> Tensor:
        """Run the ``training_step`` of the trainer on a micro-batch.

        A trainer's loss is a mean, a sum divided by ``items`` (``num_items_in_batch``), or the sum of such terms.
        ``items`` is multiplied by ``share``, so that each term is a mean over the micro-batch. The wrapped
        ``accelerator.backward`` then multiplies the loss by ``share``.
        """
        if share != 1:
            self._guard.refuse_unclear(micro_batch)
            items = None if items is None else items * share
        self._share, self._num_backward, self.is_idle = share, 0, False
        loss = self._original(model, copy.copy(micro_batch), items)  # a trainer may remove fields from it
        if share != 1 and not self._num_backward:
            raise self._no_backward()
        return loss

    def _loss_of(self, _: transformers.Trainer, model: nn.Module, items: Any, micro_batch: Any, share: float) -> Tensor:
        """Return the loss that ``training_step`` passes to backward for a micro-batch, without running backward."""
        self._noted = []
        try:
            self._original(model, copy.copy(micro_batch), None if items is None else items * share)
            losses = self._noted
        except RuntimeError as error:  # raised by ``loss.backward()`` without gradients
            if "does not require grad" not in str(error):
                raise
            raise self._no_backward() from error
        finally:
            self._noted = None
        if not losses:
            raise self._no_backward()
        return torch.stack(losses).sum()

    def _no_backward(self) -> InputError:
        return InputError(
            f"{type(self._trainer).__name__}.training_step does not call self.accelerator.backward, so the "
            "micro-batches of a batch cannot be weighted: use it in place of loss.backward()"
        )

    def loss(self, computed: Callable[[nn.Module, Any], Any], model: nn.Module, inputs: Any) -> Any:
        """Compute the loss with the trainer's ``compute_loss`` and the techniques that wrap it."""
        self._compute_loss = computed
        return self.transaction.workload.loss(model, inputs)

    def _computed_loss(self, model: nn.Module, inputs: Any) -> Any:
        return self._compute_loss(model, inputs)

    def _wrapped_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: Tensor, **options: Any) -> None:
            if self._noted is not None:
                self._noted.append(loss)
                return
            self._num_backward += 1
            self.transaction.position.phase = "backward"
            original(loss if self._share == 1 else loss * self._share, **options)

        return backward

    def _wrapped_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)  # keeps the attribute by which a schedule marks the method that it has wrapped
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            try:
                self.transaction.finish(partial(self._finish, original, closure))
            finally:
                self.is_idle, self._share = True, 1.0
                self._guard.note(self.transaction.events)

        return MethodType(step, self._optimizer)

    def _finish(self, step: Callable[..., Any], closure: Any, gradients: Callable[[], Tensor]) -> None:
        gradients()
        trainer: Any = self._trainer
        if self.transaction.is_again:  # repeat the steps that the trainer did with the first gradients
            if trainer.args.max_grad_norm:
                trainer._clip_grad_norm(self._model)
            trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
        with stepped_as_now(self._optimizer):
            step(closure)


__all__ = ["Protection", "fit", "protected", "to_training_arguments"]
