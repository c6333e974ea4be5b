"""The adapter for Lightning: a callback that makes the optimizer steps of a ``Trainer`` recover from memory errors.

    trainer = lightning.Trainer(callbacks=[plimsoll.lightning.OomProof(units="samples")], ...)
    trainer.fit(module, loader)

Values that ``self.log`` logs per step and the outputs of ``training_step`` cover the whole batch: means are weighted by
the shares of the micro-batches in the batch. Hooks of the backward pass are called for each micro-batch, and again on
each retry.

Not handled:

- manual optimization and several processes, which are refused;
- memory errors while Lightning moves the batch to the device, which happens before the step;
- restoring attributes that a module changes itself, such as a list of outputs;
- the value per step of a logged metric object, which covers only the last micro-batch;
- ``reduce_fx=sum`` over an epoch, which counts micro-batches.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.data.batch import Units, batch_size_of
from plimsoll.errors import InputError
from plimsoll.integrations.loops.lightning_logs import joined_values, mean, remember
from plimsoll.integrations.loops.planned import planned, refuse_both
from plimsoll.integrations.loops.transaction import PutBack, Transaction, techniques_for_loops
from plimsoll.records.former import former_arguments
from plimsoll.records.plan import Choice, Configuration, Plan
from plimsoll.records.run import OomEvent
from plimsoll.records.units import parse_bytes
from plimsoll.step.result import at_least_fp32
from plimsoll.step.retry import scaler_as_now
from plimsoll.step.undo.saved import Stateful

try:
    import lightning
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torchmetrics import Metric

    from plimsoll.integrations.loops.lightning_evaluations import Evaluations
except ModuleNotFoundError as missing:
    raise InputError(
        f"plimsoll.integrations.lightning needs the package {missing.name}: run `pip install torch-plimsoll[lightning]`"
    ) from None

_USED_OF_THE_LOOP = (
    "run",
    "optim_progress",
    "_training_step",
    "_make_zero_grad_fn",
    "_make_backward_fn",
    "_optimizer_step",
)
"""Attributes of Lightning's automatic optimization used here; all but the first two are private (2.5 and 2.6)."""


class _Pass(NamedTuple):
    """A micro-batch after its pass.

    ``share`` is its share of the batch. ``extra`` holds the outputs of ``training_step`` except the loss, and
    ``logged`` the values that ``self.log`` logged per step.
    """

    batch_idx: int
    share: float
    num_samples: int
    extra: dict[str, Any]
    logged: dict[str, Tensor]


class OomProof(Callback):
    """A callback that undoes an optimizer step in which memory ran out, and repeats it with smaller micro-batches.

    Args:
        units: the loss normalizer of ``training_step``: ``"samples"``, ``"tokens"`` (labels other than -100),
            ``"next-tokens"`` (the same, for a causal model that shifts the labels), or a function that returns the
            number of units in a batch.
        micro_batch: initial samples per forward and backward pass; ``None`` starts with the batches of the loader.
        fallbacks: ``plan.fallbacks``: the configuration to start with, then the configurations to change to when memory
            runs out. Not together with ``micro_batch``.
        budget: device memory for the process, such as ``"8GiB"``, instead of ``micro_batch`` and ``fallbacks``. The
            plan is made at the first batch, by tracing ``training_step`` without a trainer, and the budget is enforced
            until training ends.
        batch: with ``budget``, the batch for which the plan is made, which should be the largest; by default the first
            batch.
        recut_batch_norm: allow splitting a batch although BatchNorm's statistics then differ from the whole batch's.
        recut_loss: allow splitting a batch although its loss was not shown to be the sum of the losses of its parts.
        never_cut: keep every batch whole.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` whose state is restored when a step is undone.
        allow_hidden_state: retry after an out-of-memory error even if some state cannot be restored.
        grow_after: number of successful batches after which the next larger micro-batch is tried.
        logs_memory: log ``plimsoll/peak_bytes``, ``plimsoll/used_bytes``, ``plimsoll/micro_batch`` and
            ``plimsoll/oom`` (errors survived so far) to the loggers of the trainer, every ``log_every_n_steps``.
    """

    @former_arguments(rungs="fallbacks")
    def __init__(
        self,
        *,
        units: Units,
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
        logs_memory: bool = True,
    ) -> None:
        self._options = {
            "units": units,
            "micro_batch": micro_batch,
            "fallbacks": fallbacks,
            "recut_batch_norm": recut_batch_norm,
            "recut_loss": recut_loss,
            "never_cut": never_cut,
            "extra_state": extra_state,
            "allow_hidden_state": allow_hidden_state,
            "grow_after": grow_after,
        }
        refuse_both(budget, batch, self._options)
        self._budget, self._batch = budget, batch
        self._logs_memory = logs_memory
        self._at_work: _Optimization | None = None
        self._evaluations: Evaluations | None = None
        self.transaction: Transaction | None = None
        self.plan: Plan | None = None

    @property
    def evaluation_events(self) -> list[OomEvent]:
        """Out-of-memory events during validation, testing and prediction."""
        return [] if self._evaluations is None else self._evaluations.events

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the steps of validation, testing and prediction, so that they recover from memory errors."""
        self._end_evaluations()
        if trainer.world_size == 1:  # several processes are refused when they train, and otherwise left alone
            self._evaluations = Evaluations(trainer, pl_module, self._budget, bool(self._options["never_cut"]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the original steps of validation, testing and prediction."""
        self._end_evaluations()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enforce the budget during the sanity check, which runs before the plan is made."""
        if self._evaluations is not None:
            self._evaluations.limit_sanity_check()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop enforcing the budget, because planning must not be limited."""
        if self._evaluations is not None:
            self._evaluations.end_sanity_check()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the optimizer steps by transactions.

        Raises:
            InputError: if this kind of training, or this version of Lightning, is not supported.
        """
        _refuse(trainer, pl_module)
        self._at_work = _Optimization(trainer, pl_module, self._options)
        self.transaction = self._at_work.transaction

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make and install the plan for the budget before the first batch.

        Raises:
            BudgetError: if nothing fits the budget; the error names a budget that would suffice.
        """
        if self._budget is not None and self._at_work is not None and not self._at_work.has_plan:
            self.plan = self._at_work.plan_for(self._budget, batch if self._batch is None else self._batch)
            self.transaction = self._at_work.transaction

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the memory use of the batch."""
        is_asked = self._logs_memory and trainer.loggers and trainer._logger_connector.should_update_logs
        if is_asked and self.transaction is not None:
            pl_module.log_dict(self.transaction.metrics(), batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original optimizer steps."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore all original steps."""
        self._give_back()
        self._end_evaluations()

    def _end_evaluations(self) -> None:
        if self._evaluations is not None:
            self._evaluations.close()

    def _give_back(self) -> None:
        if self._at_work is not None:
            self._at_work.close()
            self._at_work = None


class _Optimization:
    """Lightning's automatic optimization of one call of ``fit``, with each update as a transaction.

    It replaces the method ``run`` of Lightning's loop, and calls Lightning's own code for each pass and update. If
    memory runs out, these are restored: gradients of the accumulation window, random numbers, buffers, values of
    ``self.log``, states of torchmetrics, progress, scaler, and settings of the optimizer.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, options: dict[str, Any]) -> None:
        self._trainer, self._module, self._options = trainer, module, options
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self.transaction = self._new_transaction()
        self.has_plan = False
        self._limit = ExitStack()
        self._metrics = [one for one in module.modules() if isinstance(one, Metric)]
        self._passes: list[_Pass] = []
        self._is_zeroed = False
        self._loop.run = self._run  # type: ignore[method-assign]

    @property
    def _results(self) -> Any:
        """The results to which ``self.log`` writes. Validation within an epoch has results of its own."""
        return self._trainer._results

    def close(self) -> None:
        """Restore Lightning's own optimization, and stop enforcing the budget."""
        self._loop.__dict__.pop("run", None)
        self.transaction.close()
        self._limit.close()

    def plan_for(self, budget: str | int, batch: Any) -> Plan:
        """Plan for a budget, install the plan, and enforce the budget from now on."""
        module, optimizer = self._module, self._trainer.optimizers[0]
        with _without_trainer(module):
            plan = planned(
                module,
                optimizer,
                batch,
                partial(_loss_of_step, self._trainer),
                budget=budget,
                units=self._options["units"],
                device=module.device,
                offered=techniques_for_loops(),
                clip_norm=_clip_norm_of(self._trainer),
            )
        self.transaction = self._new_transaction(fallbacks=plan.fallbacks)
        self._limit.enter_context(self.transaction.backend.limited(parse_bytes(budget)))
        self.has_plan = True
        return plan

    def _new_transaction(self, **options: Any) -> Transaction:
        optimizer = self._trainer.optimizers[0]
        return Transaction(self._module, optimizer, remember=self._remember, **{**self._options, **options})

    def _run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Run a batch in place of Lightning's ``run``, and return the loss and other outputs of ``training_step``."""
        if "batch" not in kwargs:
            raise InputError(
                f"training_step takes {', '.join(kwargs)}, an iterator, whose batches cannot be read twice: give it "
                "the parameters batch and batch_idx"
            )
        one_pass = partial(self._one_pass, optimizer, batch_idx, kwargs)
        finish = None if self._trainer.fit_loop._should_accumulate() else partial(self._loop._optimizer_step, batch_idx)
        self._passes = []
        self.transaction.run(kwargs["batch"], one_pass, finish, partial(self._loss_of, kwargs))
        # If the window was repeated, it contains passes of earlier batches, too.
        passes = [one for one in self._passes if one.batch_idx == batch_idx]
        if not passes:
            return {}
        if len(passes) > 1:
            self._log_whole_batch(passes)
        return {"loss": self.transaction.loss, **_joined(passes)}

    def _one_pass(
        self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: dict[str, Any], micro_batch: Any, share: float
    ) -> Tensor:
        results = self._results
        results.batch, results.batch_size = micro_batch, None  # `self.log` infers the number of samples from it
        output = self._loop._training_step(type(kwargs)(kwargs, batch=micro_batch))
        if output.closure_loss is None:  # `training_step` skips this micro-batch
            return torch.zeros((), device=self._module.device)
        self._zero_once(batch_idx, optimizer)
        self.transaction.position.phase = "backward"
        loss = output.closure_loss if share == 1 else output.closure_loss * share
        self._loop._make_backward_fn(optimizer)(loss)
        logged = {} if share == 1 else self._logged()
        self._passes.append(_Pass(batch_idx, share, batch_size_of(micro_batch), output.extra, logged))
        return at_least_fp32(output.loss)

    def _loss_of(self, kwargs: dict[str, Any], micro_batch: Any, share: float) -> Tensor:
        """Return the loss of a micro-batch, and undo the effects of computing it on logs, metrics and progress."""
        before, put_back = (self._passes, self._is_zeroed), self._remember()
        try:
            self._results.batch, self._results.batch_size = micro_batch, None
            loss: Tensor | None = self._loop._training_step(type(kwargs)(kwargs, batch=micro_batch)).closure_loss
            return torch.zeros((), device=self._module.device) if loss is None else loss
        finally:
            put_back()
            self._passes, self._is_zeroed = before

    def _zero_once(self, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Zero the gradients after the first forward pass of a step, as Lightning does, but not after later passes."""
        if self._is_zeroed:
            return
        self._is_zeroed = True
        zero = self._loop._make_zero_grad_fn(batch_idx, optimizer)
        if zero is not None:
            zero()

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _logged(self) -> dict[str, Tensor]:
        """Return the per-step values that the last pass has logged, by their keys in Lightning's results."""
        return {
            key: result._forward_cache.detach()
            for key, result in self._results.valid_items()
            if result.meta.fx == "training_step" and result.meta.on_step and result.is_tensor
        }

    def _log_whole_batch(self, passes: list[_Pass]) -> None:
        """Replace the logged values of the last micro-batch by values of the whole batch."""
        for key, result in self._results.items():
            values = [one.logged[key] for one in passes if key in one.logged]
            if not values:
                continue
            if result.meta.is_mean_reduction:
                shares = [one.share for one in passes if key in one.logged]
                whole = mean(values, shares)
            elif result.meta.is_custom_reduction:
                continue
            else:
                whole = result.meta.reduce_fx(torch.stack(values))
            result._forward_cache = whole
            if not result.meta.on_epoch:
                result.value = whole

    # -- undoing -------------------------------------------------------------------------------------------------------

    def _remember(self) -> PutBack:
        self._is_zeroed = False
        return partial(self._put_back, self._loop.optim_progress.state_dict(), remember(self._results, self._metrics))

    def _put_back(self, progress: dict[str, Any], logs: PutBack) -> None:
        self._passes, self._is_zeroed = [], False
        self._loop.optim_progress.load_state_dict(progress)
        logs()
        plugin: Any = self._trainer.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = scaler_as_now(plugin.scaler)


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Detach the trainer, so that copies of the module exclude it and ``self.log`` does nothing."""
    trainer, module._trainer = module._trainer, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
            yield
    finally:
        module._trainer = trainer


def _loss_of_step(trainer: Trainer, module: nn.Module, batch: Any) -> Tensor:
    """Return the loss that ``training_step`` computes with batch index 0 and loader index 0."""
    training_step: Any = module.training_step
    numbers = [0] * (len(inspect.signature(training_step).parameters) - 1)  # some steps take no batch_idx
    with trainer.precision_plugin.train_step_context():
        found = training_step(batch, *numbers)
    loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return loss


def _clip_norm_of(trainer: Trainer) -> float | None:
    is_norm = trainer.gradient_clip_algorithm in (None, "norm")
    return trainer.gradient_clip_val if is_norm and trainer.gradient_clip_val else None


def _joined(passes: list[_Pass]) -> dict[str, Any]:
    """Join the outputs of ``training_step``, except the loss, over the passes of all micro-batches.

    An output that an earlier pass lacks keeps the last pass's value. An output that the last pass lacks is dropped.
    """
    extras = [one.extra for one in passes]
    shares, sizes = [one.share for one in passes], [one.num_samples for one in passes]
    both = {name for name in extras[-1] if all(name in extra for extra in extras)}
    return {
        name: joined_values([extra[name] for extra in extras], shares, sizes) if name in both else value
        for name, value in extras[-1].items()
    }


def _refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise if the steps of this training cannot be run as transactions.

    Raises:
        InputError: for manual optimization, several processes, or a version of Lightning without the attributes used
            here.
    """
    if not module.automatic_optimization:
        raise InputError(
            f"{type(module).__name__} has automatic_optimization=False, so its training_step updates the parameters "
            "itself: use plimsoll.TrainStep there, or set automatic_optimization=True"
        )
    if trainer.world_size > 1 or trainer.strategy.handles_gradient_accumulation:
        raise InputError(
            f"OomProof can undo the step of one process only, but this trainer has {trainer.world_size} with "
            f"{type(trainer.strategy).__name__}: give devices=1, or use `plimsoll train --nproc`"
        )
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    missing = [name for name in _USED_OF_THE_LOOP if not hasattr(loop, name)]
    if missing:
        raise InputError(
            f"lightning {lightning.__version__} has no {', '.join(missing)} in its automatic optimization, which "
            "OomProof uses: install lightning 2.6"
        )
