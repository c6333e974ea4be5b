"""A training step that survives running out of memory: the optimizer step happens once as a whole, or not at all.

    step = TrainStep(model, optimizer, units="next-tokens", clip_norm=1.0)
    result = step(batch)

With one micro-batch, results are bitwise equal to a plain PyTorch loop. With several, the mathematics is the same, but
roundings and dropout masks differ, as in plain PyTorch. A batch is split into micro-batches only if its loss is known
or shown to be additive (`plimsoll.step.losses.additive`). It is not split if an embedding scales gradients by the
contents of a pass (``scale_grad_by_freq``). Nor is it split if BatchNorm uses batch statistics, unless
``recut_batch_norm`` allows it.

Not handled: LBFGS and other optimizers that need a closure, and parameters added to the model after the step was
constructed. Gradients that exist before the step are dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from plimsoll.data.batch import Units, move_batch
from plimsoll.device.base import Backend, backend_for
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.distributed.ranks import Ranks
from plimsoll.distributed.reduction import Reduction
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.models.workload import LossFunction, Precision, Workload, model_loss
from plimsoll.records.device import MemoryUse
from plimsoll.records.former import former_arguments, renamed, warn_of_former
from plimsoll.records.plan import Choice, Configuration
from plimsoll.records.run import OomEvent
from plimsoll.step.checks import device_of, refuse, refuse_batch, refuse_no_target, refuse_non_finite, refuse_recut
from plimsoll.step.collective import attempt_collectively, told_by_all
from plimsoll.step.evaluate import Evaluation, Evaluator
from plimsoll.step.failpoints import failpoint
from plimsoll.step.fallbacks import InstalledFallbacks, after_oom, fallback_schedule_of, measured, take_back
from plimsoll.step.losses.additive import Additivity
from plimsoll.step.micro_batches import (
    NOTHING,
    Filler,
    Shape,
    mean_loss,
    no_way_out,
    parts_of_all,
    shape_of,
    weighted_micro_batches,
)
from plimsoll.step.missing_gradients import UnreachedWatch
from plimsoll.step.oom_boundary import Position
from plimsoll.step.passes import Passes
from plimsoll.step.recovery import FallbackSchedule, Size, state_after_death
from plimsoll.step.result import Outcome, StepResult, note
from plimsoll.step.retry import Retry, first_samples, scaler_as_now
from plimsoll.step.undo.saved import Stateful
from plimsoll.step.update.after_update import AfterUpdate
from plimsoll.step.update.commit import StepCommit
from plimsoll.step.update.gradient_release import GradientRelease, gradient_release
from plimsoll.step.update.sparse import clippable
from plimsoll.techniques.mechanisms.uncuttable import WholeBatch

T = TypeVar("T")
_SMALLEST_SCALE = 1.0  # fp16 steps are skipped while the scale falls; below this scale the loss itself is not finite


class TrainStep:
    """One optimizer step as a transaction. The module docstring states the guarantees.

    Args:
        model: the model, on the device it trains on.
        optimizer: any ``torch.optim`` optimizer of its parameters, except LBFGS.
        loss: ``loss(model, batch)`` returns the mean loss, a scalar tensor; by default ``model(**batch).loss``.
        units: the loss normalizer: ``"samples"``, ``"tokens"`` (labels other than -100), ``"next-tokens"`` (the same,
            for a causal model that shifts the labels), or a function that returns the number of units in a batch.
            Optional if the model computes its own loss and each sample has one label.
        micro_batch: initial samples per forward and backward pass; ``None`` starts with the whole batch.
        fallbacks: ``plan.fallbacks``: the configuration to start with, then the configurations to change to when memory
            runs out. Not together with ``micro_batch``. Each may be given as only its choices, without predictions.
        clip_norm: the maximum global gradient norm, applied after accumulation.
        schedule: a learning-rate schedule, stepped after every update.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` by autocast (fp16 with a gradient scaler).
        recut_batch_norm: allow splitting a batch although BatchNorm's statistics then differ from the whole batch's.
        recut_loss: allow splitting a batch although its loss was not shown to be the sum of the losses of its parts.
        never_cut: keep every batch whole.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` that hold state which passes change and
            `plimsoll.step.undo.find_state` does not find. It is restored with the step, and saved by `state_dict`.
        allow_hidden_state: retry after an out-of-memory error even if some state cannot be restored.
        grow_after: number of successful steps after which the next larger micro-batch is tried. Three steps are enough
            if the measured peaks show that this size fits.
        full_length: tokens of the longest sample in the data set. If samples are sorted by length, ``micro_batch``
            counts samples of this length, and a micro-batch of shorter samples holds more of them, up to the same
            number of elements. By default, the longest sample of each batch is used.
        backend: replaces the backend of the device, in a dry run.
        position: the record of step and phase for error messages; a dry run passes its own.
        files: the pool of memory-mapped files that hold the model; ``None`` if no model is stored in files.
        ranks: the ranks that train the same model on other parts of each batch with the same step. Gradients are summed
            once all ranks have computed them. If memory runs out on one rank, all ranks undo the step.

    Raises:
        InputError: if an argument cannot be used (see `plimsoll.step.checks`).
    """

    @former_arguments(rungs="fallbacks")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction = model_loss,
        *,
        units: Units | None = None,
        micro_batch: int | None = None,
        fallbacks: Sequence[Configuration | Sequence[Choice]] | None = None,
        clip_norm: float | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        precision: Precision = "fp32",
        recut_batch_norm: bool = False,
        recut_loss: bool = False,
        never_cut: bool = False,
        extra_state: Sequence[Stateful] = (),
        allow_hidden_state: bool = False,
        grow_after: int = 50,
        full_length: int | None = None,
        backend: Backend | None = None,
        position: Position | None = None,
        files: MappedPool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        device = device_of(model)
        kind = backend.kind if backend else device.type
        refuse(model, optimizer, precision, micro_batch, loss=loss, units=units, kind=kind)
        if fallbacks and micro_batch is not None:
            raise InputError(
                f"micro_batch={micro_batch} was given with {len(fallbacks)} fallbacks, each of which sets its own "
                "micro-batch: leave one of the two out"
            )
        self._units_are_assumed = units is None
        self._has_own_loss = loss is not model_loss
        self.workload = Workload(model, optimizer, loss, units or "samples", schedule, clip_norm, precision, device)
        self.workload.full_length, self.workload.files, self.workload.ranks = full_length, files, self.ranks
        self.position = position or Position()
        self.backend: Backend = backend or backend_for(str(device))
        self.fallback_schedule: FallbackSchedule | None = None
        told = self.workload, self.backend, self.position
        self.additivity = Additivity(*told, recut_loss, never_cut, extra_state=extra_state)
        self._fallbacks = InstalledFallbacks(self.workload, fallbacks or ())
        model, optimizer, precision = self.workload.model, self.workload.optimizer, self.workload.precision
        self._learned: dict[str, Any] | None = None
        self._first_micro_batch, self._grow_after = micro_batch, grow_after
        self._whole = WholeBatch(self.workload, recut_batch_norm)
        self._parameters = list(model.parameters())  # listed once, because walking the modules is slow
        self._retry = Retry(
            {"model": model, "loss": loss, "units": units},
            self.backend,
            self.position,
            optimizer=optimizer,
            extra_state=extra_state,
            allow_hidden_state=allow_hidden_state,
            observes=backend is None and not self.workload.hooks.sharding.is_sharded,
        )
        self._commit = StepCommit(optimizer, self.backend, self.position, ranks=self.ranks)
        self._following = AfterUpdate(optimizer, self.backend, self.position)
        self._reduction = None if self.ranks.is_alone else Reduction(self.ranks, self._all_parameters())
        self._gradient_release: GradientRelease | None = None
        self._filler = Filler(self.workload, is_lent=False)
        is_dry_run = backend is not None
        own = self._retry, self.backend, self.position, self._all_parameters
        self._passes = Passes(self.workload, *own, is_dry_run=is_dry_run)
        self.graphs, self.replays = self._passes.graphs, self._passes.replays
        self.unreached = UnreachedWatch(model, is_done=is_dry_run)  # a dry run is not a training
        self._evaluator = Evaluator(*told, self._shape_of, grow_after, self.additivity)
        if micro_batch is not None or fallbacks:
            self._evaluator.begin_at(micro_batch or self._fallbacks.sizes[0].samples)
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._is_asked = True  # whether it is known if the current batch may be split

    @property
    def micro_batch(self) -> int | None:
        """The current micro-batch in samples; ``None`` before the first batch if no size was given."""
        if self.fallback_schedule is not None or self._fallbacks.sizes:
            fallback_schedule = self._fallback_schedule_for(0)
            return fallback_schedule.sizes[fallback_schedule.in_force].samples
        if self._learned is not None and self._whole.reason() is None:
            return int(self._learned["size"])
        return self._first_micro_batch

    @property
    def fallback(self) -> int:
        """The index of the current fallback in ``fallbacks``.

        It is 0 before the first batch, unless a checkpoint was loaded or `begin_again_at` was called.
        """
        is_unknown = self.fallback_schedule is None and not self._fallbacks.sizes
        return 0 if is_unknown else self._fallback_schedule_for(0).in_force

    @property
    def rung(self) -> int:
        """The former name of `fallback`."""
        warn_of_former("TrainStep.rung", "TrainStep.fallback")
        return self.fallback

    @property
    def num_steps(self) -> int:
        """The number of completed steps."""
        return self.position.step

    def __call__(self, batch: Any, on_oom: Callable[[OomEvent], None] | None = None) -> StepResult:
        """Run one optimizer step on ``batch``, in as many micro-batches as needed.

        Args:
            batch: a dict, tuple, list or tensor whose tensors have the samples in dimension 0.
            on_oom: called with each out-of-memory event that the step recovers from.

        Raises:
            OutOfMemoryError: if memory ran out and no smaller micro-batch is left; the step is undone.
            AfterUpdateError: if memory ran out after the update, for example in the learning-rate scheduler; the update
                is kept.
            NonFiniteLossError: if the loss is NaN or infinite; the step is undone.
            InputError: if the batch cannot be split, or splitting would change the result.
        """
        started = time.perf_counter()
        own = self._shape_of(batch)
        shape, num_samples, lends = parts_of_all(own, self.ranks)
        self._filler = Filler(self.workload, is_lent=lends)
        refuse_no_target(shape, self.num_steps + 1)
        fallback_schedule = self._fallback_schedule_for(shape.num_samples)
        fallback = self._allowed(batch, fallback_schedule, fallback_schedule.choose(shape.elements_per_sample), shape)
        events: list[OomEvent] = []
        self._drop_gradients()
        known, second_fallback = fallback_schedule.state_dict(), None
        outcome: Outcome | OomEvent | None = None
        try:
            while not isinstance(outcome, Outcome):
                size = self.position.micro_batch = min(fallback_schedule.sizes[fallback].samples, shape.num_samples)
                outcome = self._run(batch, fallback_schedule.sizes[fallback]._replace(samples=size), own, shape)
                if isinstance(outcome, OomEvent):
                    self.replays.drop()
                    self._put_back()
                    outcome = told_by_all(outcome, self.ranks)
                    self._retry.refuse(outcome, self.ranks)
                    self._is_asked = self._keep_whole(fallback_schedule, batch, shape)
                    event, following = self._after_oom(outcome, fallback, shape)
                    second_fallback = following if second_fallback is None else second_fallback
                    if following is None and self.ranks.is_alone and self._retry.undo.leave():
                        following = fallback_schedule.begin_again(
                            known, fallback if second_fallback is None else second_fallback
                        )
                    note(event, events, on_oom)
                    if following is None:
                        raise OutOfMemoryError(no_way_out(event, size, shape, self._whole.reason()))
                    fallback = following
        finally:
            if not isinstance(outcome, Outcome):
                self._put_back()
                self._retry.undo.settle(all_of_it=True)
        fallback_schedule.held(
            fallback, math.ceil(size * shape.elements_per_sample), measured(fallback_schedule, self, self.ranks)
        )
        self._after_update(outcome.updated)
        for event in self._commit.recovered:
            note(event, events, on_oom)
        return StepResult(
            step=self.num_steps,
            num_samples=num_samples,
            num_units=shape.num_units,
            micro_batch=size,
            fallback=fallback,
            step_seconds=time.perf_counter() - started,
            oom_events=tuple(events),
            **outcome._asdict(),
        )

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Return the mean loss over ``batches`` without gradients; see `plimsoll.step.evaluate`.

        Raises:
            OutOfMemoryError: if not even single samples fit.
        """
        return self._evaluator.evaluate(batches, self._put_to_work)

    def evaluated_at_once(self, num_samples: int) -> int:
        """Return the size in samples of the micro-batch with which `evaluate` starts on a batch of ``num_samples``."""
        return self._evaluator.at_once(num_samples)

    def use(self) -> MemoryUse:
        """Return the memory in use on the device. Its peak includes CUDA graph replays, which torch does not count."""
        use, more_bytes = self.backend.use(), self.replays.uncounted_bytes
        more = {} if use.peak_bytes is None or not more_bytes else {"peak_bytes": use.peak_bytes + more_bytes}
        return use.model_copy(update=more)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs besides the model and the optimizer."""
        schedule = self.workload.schedule
        return {
            "step": self.num_steps,
            "fallback_schedule": self.fallback_schedule.state_dict() if self.fallback_schedule else None,
            "fallbacks": self._fallbacks.names,
            "scaler": self._scaler.state_dict() if self._scaler else None,
            "schedule": schedule.state_dict() if schedule else None,
            "extra_state": [one.state_dict() for one in self._retry.extra_state],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state that `state_dict` returned."""
        state = renamed(state, {"ladder": "fallback_schedule", "rungs": "fallbacks"})
        self.position.step = state["step"]
        self.fallback_schedule = None
        self._retry.load(state.get("extra_state", ()))
        is_same_plan = state.get("fallbacks", []) == self._fallbacks.names
        self._learned = state["fallback_schedule"] if is_same_plan else None
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        if self.workload.schedule is not None and state["schedule"] is not None:
            self.workload.schedule.load_state_dict(state["schedule"])

    def install(self) -> None:
        """Install the techniques of the current fallback, as the next step would."""
        if self._fallbacks.sizes:
            self._fallbacks.use(self._fallbacks.sizes[self.fallback].level)

    @former_arguments(rung="fallback", too_large_rung="too_large_fallback")
    def begin_again_at(self, fallback: int, too_large_fallback: int | None = None) -> None:
        """Start at another fallback, after an earlier process of the run was killed because memory ran out.

        Args:
            fallback: the index of the fallback to start at.
            too_large_fallback: the index of the fallback that killed the process; ``None`` if unknown. See
                `state_after_death`.
        """
        size = self._fallbacks.sizes[fallback]
        self.fallback_schedule, self._learned = None, state_after_death(self._learned, size, too_large_fallback)
        self._evaluator.begin_at(size.samples)
        self.additivity.most_samples = size.samples

    def close(self) -> None:
        """Remove the techniques. The model returns to its original structure and keeps its trained weights.

        Tensors that do not fit back on the device stay outside it, with a warning.

        Raises:
            OutOfMemoryError: if a model that is sharded over ranks cannot be gathered on all of them.
        """
        self._commit.forget()
        self.unreached.close()
        take_back(self._fallbacks, self.workload, self.backend, self.position)

    def drop_optimizer_states(self) -> None:
        """Free the optimizer states. Call this only if no step follows."""
        self.workload.optimizer.state.clear()
        self._commit.forget()
        self.backend.release()

    # -- one try of a step ---------------------------------------------------------------------------------------------

    def _run(self, batch: Any, size: Size, own: Shape, shape: Shape) -> Outcome | OomEvent:
        """Try one step: gradients in micro-batches, clipping, update. The caller restores the state after an event.

        ``own`` is the shape of this rank's part of the batch, ``shape`` the shape of all parts (see `parts_of_all`).
        """
        if not self._is_asked:
            self.position.phase = "copy"
            outcome = self._collectively(partial(self._use, size.level))
            if isinstance(outcome, OomEvent):
                return outcome
            if not self.ranks.is_alone or size.samples < shape.num_samples:
                refuse_recut(self.additivity.before_cut(batch), size.samples, shape, self.ranks)
        loss = self._collectively(lambda: self._gradients_at(batch, size, own, shape))
        if self._reduction is not None and not isinstance(loss, OomEvent):
            loss = self._reduction.add_up_all(loss, self._collectively)
        return loss if isinstance(loss, OomEvent) else self._finish(loss)

    def _finish(self, loss: float) -> Outcome | OomEvent:
        """Clip the accumulated gradients and update the parameters."""
        refuse_non_finite("loss", loss, self.workload, self.position)
        gradient_norm = self._collectively(self._clip)
        if isinstance(gradient_norm, OomEvent):
            return gradient_norm
        learning_rate = float(self.workload.optimizer.param_groups[0]["lr"])
        self.position.phase = "optimizer"
        self._commit.was_called, self._commit.recovered = False, []
        if self._scaler is None:
            self._commit.step()
        else:
            self._scaler.step(self._commit)  # type: ignore[arg-type]  # it has the attributes that a scaler uses
        if self._commit.was_called and self._commit.outcome is not None:
            return self._commit.outcome
        return Outcome(loss, gradient_norm, learning_rate, updated=self._commit.was_called)

    def _after_update(self, updated: bool) -> None:
        self._gradient_release = None
        self._retry.undo.done()
        self.position.step += 1
        self._following.do(self._scaler, self.workload.schedule if updated else None, self.workload.hooks.after_step)
        self.graphs.look(self.num_steps)
        self.unreached.look(self.num_steps)

    def _collectively(self, work: Callable[[], T]) -> T | OomEvent:
        return attempt_collectively(work, self.backend, self.position, self.ranks)

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model, then all parameters in the optimizer's groups.

        Parameters in both occur twice. The optimizer may also have parameters outside the model.
        """
        yield from self._parameters
        for group in self.workload.optimizer.param_groups:
            yield from group["params"]

    def _drop_gradients(self) -> None:
        for parameter in self._all_parameters():
            parameter.grad = None

    def _gradients_at(self, batch: Any, size: Size, own: Shape, shape: Shape) -> float:
        """Compute the gradients of this rank's part of the batch, and return its contribution to the mean loss.

        The techniques of ``size.level`` are installed before, unless they are installed already.
        """
        self.position.phase = "copy"
        self._use(size.level)
        loss = self._retry.until_settled(partial(self._once, batch, size.samples, own, shape), self._put_back)
        self.workload.hooks.sharding.hand_over()
        if self._reduction is not None:
            self._reduction.prepare()
        return loss

    def _once(self, batch: Any, micro_batch: int, own: Shape, shape: Shape) -> float:
        """Save the training state, compute this rank's gradients, and return its contribution to the mean loss."""
        loss_of = partial(self._loss_of, batch, micro_batch) if self.ranks.is_alone else None
        self._retry.remember(batch, loss_of, None if self.workload.hooks.update_early else [*self._all_parameters()])
        releases_gradients = gradient_release(self.workload, micro_batch, own.num_samples) is not None
        self._retry.undo.is_updating = releases_gradients
        with nullcontext() if releases_gradients else self._retry.observing():
            loss = self._gradients(batch, micro_batch, own, shape)
            self._retry.undo.passed()
        self._retry.observed()
        return loss

    def _loss_of(self, batch: Any, micro_batch: int) -> torch.Tensor:
        samples = first_samples(batch, micro_batch, self.workload.model)
        return mean_loss(self.workload, move_batch(samples, self.workload.device))

    def _use(self, level: int) -> None:
        if not self._fallbacks.is_in_force(level):
            self._commit.forget()  # techniques may move tensors that it has views of
            self._retry.undo.forget()
            self._fallbacks.use(level)

    def _put_to_work(self) -> list[OomEvent]:
        """Install the techniques of the current fallback, or of the next fallback that fits, unless they are installed.

        Returns:
            The out-of-memory events of fallbacks that did not fit.
        """
        events: list[OomEvent] = []
        while not self._fallbacks.has_one_in_force:
            fallback, (samples, level) = self.fallback, self._fallbacks.sizes[self.fallback]
            event = self._collectively(partial(self._use, level))
            if isinstance(event, OomEvent):
                self.backend.release()
                shape = Shape(samples, samples, elements_per_sample=0)  # no batch is involved
                event, following = self._after_oom(told_by_all(event, self.ranks), fallback, shape)
                events.append(event)
                if following is None:
                    raise OutOfMemoryError(no_way_out(event, samples, shape, self._whole.reason()))
        return events

    def _gradients(self, batch: Any, micro_batch: int, own: Shape, shape: Shape) -> float:
        """Accumulate the gradients of this rank's part of the batch, and return its contribution to the mean loss."""
        total = torch.zeros((), device=self.workload.device)
        micro_batches = weighted_micro_batches(batch, micro_batch, own, self.workload, shape.num_units)
        if self.workload.hooks.sharding.is_sharded:
            micro_batches = self._filler.filled(micro_batches, -(-shape.num_samples // micro_batch))
        else:
            self.unreached.begin()
        self.replays.begin()
        self._gradient_release = gradient_release(self.workload, micro_batch, own.num_samples)
        with self._gradient_release.in_backward() if self._gradient_release else nullcontext():
            for part, share, _ in micro_batches:
                total = total + self._passes.add(
                    part, share, self._scaler, releases_gradients=self._gradient_release is not None
                )
        return total.item()

    def _clip(self) -> float | None:
        """Clip the gradients of the whole batch. Return their norm before clipping; ``None`` without ``clip_norm``."""
        self.position.phase = "clip"
        failpoint("clip")
        clip_norm, sharding = self.workload.clip_norm, self.workload.hooks.sharding
        if self._scaler is not None:
            self._scaler.unscale_(self._commit)  # type: ignore[arg-type]
            sharding.agree_on_infinities(self._scaler, self._commit)
        if clip_norm is None:
            return None
        norm = sharding.clip(clippable(self._parameters), clip_norm).item()
        # Under fp16 gradients overflow occasionally. The scaler then skips the update and lowers the scale.
        if self._scaler is None or self._scaler.get_scale() < _SMALLEST_SCALE:
            refuse_non_finite("gradient norm", norm, self.workload, self.position)
        return norm

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        self._retry.put_back(self._put_back_own)
        self.backend.release()

    def _put_back_own(self) -> None:
        self._drop_gradients()
        self.workload.hooks.sharding.reset()
        if self._gradient_release is not None:
            self._gradient_release.undo()
        self._gradient_release = None
        self._commit.forget()
        if self._scaler is not None:
            self._scaler = scaler_as_now(self._scaler)

    def _shape_of(self, batch: Any) -> Shape:
        if not self.ranks.is_alone and isinstance(batch, Mapping) and not batch:
            return NOTHING
        refuse_batch(batch, has_own_loss=self._has_own_loss, units_are_assumed=self._units_are_assumed)
        return shape_of(batch, self.workload)

    def _fallback_schedule_for(self, num_samples: int) -> FallbackSchedule:
        """Return the fallback schedule for a batch of ``num_samples``, newly created if the last one is too small."""
        self.fallback_schedule = fallback_schedule_of(
            self._fallbacks,
            self.fallback_schedule,
            num_samples,
            first_micro_batch=self._first_micro_batch,
            grow_after=self._grow_after,
            is_whole=self._whole.reason() is not None,
            learned=self._learned,
        )
        return self.fallback_schedule

    def _allowed(self, batch: Any, fallback_schedule: FallbackSchedule, fallback: int, shape: Shape) -> int:
        """Return the index of the fallback with which the step begins.

        This is ``fallback``, or a fallback that keeps the batch whole if the batch must not be split.
        """
        self._is_asked = True
        if not self.ranks.is_alone or fallback_schedule.sizes[fallback].samples < shape.num_samples:
            # Install them first: the passes that compare losses may not fit without the techniques.
            self._collectively(partial(self._use, fallback_schedule.sizes[fallback].level))
            self._is_asked = self._keep_whole(fallback_schedule, batch, shape)
            fallback = fallback_schedule.choose(shape.elements_per_sample)
        refuse_recut(self._whole.reason(), fallback_schedule.sizes[fallback].samples, shape, self.ranks)
        return fallback

    def _keep_whole(self, fallback_schedule: FallbackSchedule, batch: Any, shape: Shape) -> bool:
        """Use only fallbacks that keep batches whole if this batch must not be split.

        Returns:
            Whether this could be determined (see `InstalledFallbacks.keep_whole`).
        """
        with self._retry.undo.as_failed():
            return self._fallbacks.keep_whole(
                fallback_schedule, self._whole, partial(self.additivity.before_cut, batch), shape
            )

    def _after_oom(self, event: OomEvent, fallback: int, shape: Shape) -> tuple[OomEvent, int | None]:
        """Return the event with the action taken, and the index of the next fallback; ``None`` if none is left."""
        assert self.fallback_schedule is not None
        return after_oom(event, fallback, shape, self.fallback_schedule, self._fallbacks, self.backend)
