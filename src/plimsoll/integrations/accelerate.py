"""The adapter for Accelerate: an optimizer step that recovers from memory errors, in your own loop.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = plimsoll.accelerate.step(accelerator, model, optimizer, units="next-tokens", clip_norm=1.0)
    for batch in loader:
        result = step(batch)

Accelerate still does accumulation, backward, clipping, the prepared optimizer and schedule, autocast and tracking.

Not handled: several processes, DeepSpeed, FSDP, Megatron and TPUs (refused); memory errors in the prepared loader,
which moves batches to the device before a step begins, or in your own evaluation loop (use `step.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from plimsoll.data.batch import Units, move_batch
from plimsoll.errors import InputError
from plimsoll.integrations.loops.accelerated import put_back_of_scaler, stepped_as_now
from plimsoll.integrations.loops.planned import planned, refuse_both
from plimsoll.integrations.loops.transaction import Transaction, techniques_for_loops
from plimsoll.models.workload import LossFunction, Workload, model_loss
from plimsoll.records.former import former_arguments
from plimsoll.records.plan import Choice, Configuration, Plan
from plimsoll.records.run import OomEvent
from plimsoll.records.units import parse_bytes
from plimsoll.step.checks import refuse
from plimsoll.step.evaluate import Evaluation, Evaluator
from plimsoll.step.fallbacks import samples_of
from plimsoll.step.losses.additive import Additivity
from plimsoll.step.micro_batches import shape_of
from plimsoll.step.result import at_least_fp32
from plimsoll.step.undo.saved import Stateful

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


class BatchResult(NamedTuple):
    """The result of one batch.

    Attributes:
        loss: the mean loss, a tensor on the device; reading it waits for the device.
        updated: whether the batch ended a step that changed the parameters.
        micro_batch: samples per forward and backward pass.
        oom_events: out-of-memory events that were recovered from.
    """

    loss: Tensor
    updated: bool
    micro_batch: int
    oom_events: tuple[OomEvent, ...]


class AccelerateStep:
    """The training step of a prepared model and optimizer; constructed by `step`.

    The step is a function, not a ``with`` block around a batch. The body of a block cannot run again, and its variables
    (``outputs``, ``loss``) keep the graph alive. The loss is also a function, which is called for each micro-batch.

    Attributes:
        plan: the plan for the budget; ``None`` without a budget, or before the first batch.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        loss: LossFunction,
        *,
        clip_norm: float | None,
        schedule: Any,
        budget: str | int | None,
        batch: Any,
        **options: Any,
    ) -> None:
        refuse_both(budget, batch, options)
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._loss, self._clip_norm, self._schedule = loss, clip_norm, schedule
        self._options = options
        self._limit = ExitStack()
        self._budget_to_plan: str | int | None = budget
        self._evaluator: Evaluator | None = None
        self.plan: Plan | None = None
        self.transaction = self._new_transaction()
        if batch is not None:
            self._plan_with(batch)

    def __enter__(self) -> AccelerateStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the techniques of the plan from the model, and stop enforcing the budget."""
        self.transaction.close()
        self._limit.close()

    def __call__(self, batch: Any) -> BatchResult:
        """Accumulate the gradients of a batch, and update when Accelerate's accumulation is complete.

        Args:
            batch: the batch, as the loss function expects it.

        Raises:
            OutOfMemoryError: if memory ran out and not even single samples fit. The step is undone, including all
                batches accumulated for it.
            InputError: if the batch would have to be split, but this is not allowed or could change the result.
        """
        if self._budget_to_plan is not None:
            self._plan_with(batch)
        with self._accelerator.accumulate(self._model):
            is_update = self._accelerator.sync_gradients
            self.transaction.run(batch, self._one_pass, self._finish if is_update else None, self._loss_of)
            if self._schedule is not None:
                self.transaction.following.do(schedule=self._schedule)
        return BatchResult(
            self.transaction.loss,
            is_update and not self._optimizer.step_was_skipped,
            self.transaction.micro_batch,
            tuple(self.transaction.events),
        )

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Return the mean loss over ``batches`` without gradients, as `TrainStep.evaluate` does.

        Raises:
            OutOfMemoryError: if not even single samples fit; the training state is unchanged.
        """
        if self._evaluator is None:
            self._evaluator = self._new_evaluator()
        return self._evaluator.evaluate(batches)

    def metrics(self) -> dict[str, float]:
        """Return memory use, micro-batch size and error count for ``accelerator.log`` (see `Transaction.metrics`)."""
        return self.transaction.metrics()

    def _new_transaction(self, **options: Any) -> Transaction:
        put_back = partial(put_back_of_scaler, self._accelerator, self._optimizer)
        options = {"roots": {"loss": self._loss}, **self._options, **options}
        return Transaction(self._model, self._optimizer.optimizer, remember=put_back, **options)

    def _new_evaluator(self) -> Evaluator:
        workload = Workload(
            self._model,
            self._optimizer.optimizer,
            self._loss,
            self._options["units"] or "samples",
            device=self._accelerator.device,
        )
        made = self.transaction
        told = workload, made.backend, made.position
        options = self._options
        said = Additivity(*told, options["recut_loss"], options["never_cut"], extra_state=options["extra_state"])
        evaluator = Evaluator(*told, partial(shape_of, workload=workload), self._options["grow_after"], said)
        if self.plan is not None:
            evaluator.begin_at(samples_of(self.plan.choices))
        return evaluator

    def _plan_with(self, batch: Any) -> None:
        """Make and install the plan for the budget, and enforce the budget from now on."""
        budget = self._budget_to_plan
        assert budget is not None
        self.plan = planned(
            self._model,
            self._optimizer.optimizer,
            batch,
            self._loss,
            budget=budget,
            units=self._options["units"],
            device=self._accelerator.device,
            offered=techniques_for_loops(),
            clip_norm=self._clip_norm,
        )
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.transaction = self._new_transaction(fallbacks=self.plan.fallbacks)
            self._limit.enter_context(self.transaction.backend.limited(parse_bytes(budget)))
            on_failure.pop_all()
        self._budget_to_plan = None

    def _loss_of(self, micro_batch: Any, share: float) -> Tensor:
        return self._loss(self._model, move_batch(micro_batch, self._accelerator.device))

    def _one_pass(self, micro_batch: Any, share: float) -> Tensor:
        loss = self._loss_of(micro_batch, share)
        self.transaction.position.phase = "backward"
        self._accelerator.backward(loss * share if share != 1 else loss)
        return at_least_fp32(loss)

    def _finish(self, gradients: Callable[[], Tensor]) -> None:
        gradients()
        if self._clip_norm is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        with stepped_as_now(self._optimizer):
            self._optimizer.step()


@former_arguments(rungs="fallbacks")
def step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    loss: LossFunction = model_loss,
    *,
    units: Units | None = None,
    clip_norm: float | None = None,
    schedule: Any = None,
    micro_batch: int | None = None,
    fallbacks: Sequence[Configuration | Sequence[Choice]] | None = None,
    budget: str | int | None = None,
    batch: Any = None,
    recut_batch_norm: bool = False,
    recut_loss: bool = False,
    never_cut: bool = False,
    extra_state: Sequence[Stateful] = (),
    allow_hidden_state: bool = False,
    grow_after: int = 50,
) -> AccelerateStep:
    """Construct the training step of a prepared model and optimizer; call it with each batch.

    Args:
        accelerator: an accelerator with one process.
        model: the model from ``accelerator.prepare``.
        optimizer: the optimizer from ``accelerator.prepare``.
        loss: ``loss(model, batch)`` returns the mean loss; by default ``model(**batch).loss``.
        units: the loss normalizer, as for `plimsoll.TrainStep`. Optional if the model computes its own loss and each
            sample has one label.
        clip_norm: the global gradient norm that ``accelerator.clip_grad_norm_`` clips to before each update.
        schedule: a prepared learning-rate schedule, stepped after each batch, as is usual with Accelerate.
        micro_batch: initial samples per forward and backward pass; ``None`` starts with the whole batch.
        fallbacks: ``plan.fallbacks``: the configuration to start with, then the configurations to change to when memory
            runs out. Not together with ``micro_batch``.
        budget: device memory for the process, such as ``"8GiB"``, instead of ``micro_batch`` and ``fallbacks``. The
            step is planned for this budget, which is enforced until the step is closed (``with
            plimsoll.accelerate.step(...) as step``, or ``step.close()``).
        batch: with ``budget``, the batch for which the plan is made, which should be the largest; by default the first
            batch.
        recut_batch_norm: allow splitting a batch although BatchNorm's statistics then differ from the whole batch's.
        recut_loss: allow splitting a batch although its loss was not shown to be the sum of the losses of its parts.
        never_cut: keep every batch whole.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` whose state is restored when a step is undone.
        allow_hidden_state: retry after an out-of-memory error even if some state cannot be restored.
        grow_after: number of successful batches after which the next larger micro-batch is tried.

    Raises:
        InputError: if there are several processes, the optimizer is not prepared, or an argument is invalid.
        BudgetError: if nothing fits the budget; the error names a budget that would suffice. Without ``batch``, the
            first call of the step raises it.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

    if accelerator.distributed_type != DistributedType.NO:
        raise InputError(
            f"the accelerator has {accelerator.num_processes} processes ({accelerator.distributed_type.value}), but "
            "this step can undo one process only: start one process, or use `plimsoll train --nproc`"
        )
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, but must be prepared by Accelerate: give the optimizer "
            "from accelerator.prepare(model, optimizer)"
        )
    refuse(model, optimizer.optimizer, "fp32", None, loss=loss, units=units, kind=accelerator.device.type)
    return AccelerateStep(
        accelerator,
        model,
        optimizer,
        loss,
        clip_norm=clip_norm,
        schedule=schedule,
        units=units,
        micro_batch=micro_batch,
        fallbacks=fallbacks,
        budget=budget,
        batch=batch,
        recut_batch_norm=recut_batch_norm,
        recut_loss=recut_loss,
        never_cut=never_cut,
        extra_state=extra_state,
        allow_hidden_state=allow_hidden_state,
        grow_after=grow_after,
    )
