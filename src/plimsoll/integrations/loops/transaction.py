"""An optimizer step as a transaction, for the training loop of another library.

Accelerate, Lightning and Hugging Face's Trainer call backward, clip and update themselves, with their own hooks,
scalers and logs. They may accumulate the gradients of several batches (a window) for one update. The caller passes a
function that runs forward and backward of a micro-batch, and a function that ends a step. If memory runs out in either
function, the window is undone: the state from before its first batch is restored, and all its batches run again in
smaller micro-batches.

Not handled: memory errors while the loop fetches a batch or moves it to the device, before the step; several processes;
optimizers that call their closure more than once (LBFGS); state that neither `plimsoll.step.undo.step_state` nor
``remember`` covers. The update frees gradients, so code that reads gradients afterwards finds ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plimsoll.data.batch import Units
from plimsoll.device.base import backend_for
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.models.workload import LossFunction, Workload, model_loss
from plimsoll.records.plan import Choice, Configuration
from plimsoll.records.run import OomEvent
from plimsoll.step.checks import device_of, refuse, refuse_no_target, refuse_recut, refuse_unclear_labels
from plimsoll.step.failpoints import failpoint
from plimsoll.step.fallbacks import InstalledFallbacks, after_oom, choices_of, fallback_schedule_of, measured
from plimsoll.step.losses.additive import Additivity, LossOf
from plimsoll.step.micro_batches import (
    MicroBatch,
    Shape,
    equal_micro_batches,
    no_way_out,
    shape_of,
    shape_of_any,
    weighted_micro_batches,
)
from plimsoll.step.missing_gradients import UnreachedWatch
from plimsoll.step.oom_boundary import Position, attempt, attempt_twice
from plimsoll.step.recovery import FallbackSchedule, Size
from plimsoll.step.retry import Retry, first_samples
from plimsoll.step.undo.saved import Stateful
from plimsoll.step.update.after_update import AfterUpdate
from plimsoll.step.update.commit import StepCommit
from plimsoll.techniques import TECHNIQUES
from plimsoll.techniques.mechanisms.technique import Part
from plimsoll.techniques.mechanisms.uncuttable import WholeBatch

OnePass = Callable[[Any, float], Tensor]
"""Runs forward and backward of a micro-batch, given with its share of the batch.

Backward starts from the mean loss times the share. The mean loss itself is returned, without its graph.
"""

Finish = Callable[[Callable[[], Tensor]], object]
"""Ends a step: calls its argument, a function that computes the gradients, and then clips and updates."""

PutBack = Callable[[], None]

_OF_THE_LOOP = frozenset[Part]({"loss", "optimizer", "precision"})


def techniques_for_loops(*, has_loss: bool = False) -> frozenset[str]:
    """Return the techniques that work in a loop of another library, and leave its optimizer and precision alone.

    Args:
        has_loss: whether the loop computes its loss with ``workload.loss``, so that techniques may wrap the loss.
    """
    at_hand = frozenset({"loss"} if has_loss else ())
    return frozenset(
        one.name
        for one in TECHNIQUES.values()
        if not one.is_for_the_run
        and one.modifies.isdisjoint(_OF_THE_LOOP)
        and one.moves <= {"activations"}
        and one.needs <= at_hand
    )


def _nothing() -> None:
    pass


class _Batch(NamedTuple):
    batch: Any
    shape: Shape
    one_pass: OnePass
    loss_of: LossOf


class _NotUpdated(MemoryError):
    """Raised through the caller's code if an update did not fit in memory and was therefore not made."""


class Transaction:
    """The optimizer steps of one model and one optimizer, each over one or several batches.

    Args:
        model: the model, on the training device.
        optimizer: the ``torch.optim`` optimizer, without the wrapper of a framework.
        units: the loss normalizer, as for `plimsoll.TrainStep`; ``None`` if each sample has one label.
        micro_batch: initial samples per forward and backward pass; ``None`` starts with whole batches.
        fallbacks: ``plan.fallbacks``, or only the choices of each fallback. Not together with ``micro_batch``.
        recut_batch_norm: allow splitting a batch although BatchNorm's statistics then differ from the whole batch's.
        recut_loss: allow splitting a batch although its loss was not shown to be the sum of the losses of its parts.
        never_cut: keep every batch whole.
        roots: objects besides the model in which the loss of the caller may keep state, by name.
        extra_state: user objects whose state is also restored, as for `plimsoll.TrainStep`.
        allow_hidden_state: retry after an out-of-memory error even if some state cannot be restored.
        grow_after: number of successful batches after which the next larger micro-batch is tried.
        remember: called before the first batch of each update; returns a function that restores the state of the
            caller's loop.
        loss: the loss of the caller, if the caller computes it with ``workload.loss``, so that techniques apply to it.
        takes_any: whether to accept batches that cannot be split and batches without targets. The former run whole. If
            false, both are refused.

    Raises:
        InputError: if an argument is invalid, or a technique cannot be used in the loop of another library.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        units: Units | None,
        micro_batch: int | None = None,
        fallbacks: Sequence[Configuration | Sequence[Choice]] | None = None,
        recut_batch_norm: bool = False,
        recut_loss: bool = False,
        never_cut: bool = False,
        roots: Mapping[str, Any] | None = None,
        extra_state: Sequence[Stateful] = (),
        allow_hidden_state: bool = False,
        grow_after: int = 50,
        remember: Callable[[], PutBack] = lambda: _nothing,
        loss: LossFunction | None = None,
        takes_any: bool = False,
    ) -> None:
        device = device_of(model)
        refuse(model, optimizer, "fp32", micro_batch, units=units, kind=device.type)
        _refuse_techniques(fallbacks or (), micro_batch, techniques_for_loops(has_loss=loss is not None))
        self.workload = Workload(model, optimizer, loss or model_loss, units or "samples", device=device)
        self.position = Position()
        self.backend = backend_for(str(device))
        self.loss = torch.zeros((), device=device)
        self.micro_batch = 0
        self.num_ooms = 0
        self.events: list[OomEvent] = []
        self._units_are_assumed, self._takes_any = units is None, takes_any
        told = self.workload, self.backend, self.position
        self.additivity = Additivity(*told, recut_loss, never_cut, extra_state=extra_state, roots=roots)
        self._fallbacks = InstalledFallbacks(self.workload, fallbacks or ())
        self._fallback_schedule: FallbackSchedule | None = None
        self._fallback = 0
        self._second_fallback: int | None = None  # used by the current step after its first event
        self._first_micro_batch, self._grow_after = micro_batch, grow_after
        self._whole = WholeBatch(self.workload, recut_batch_norm)
        # Collected once, because walking the modules in every step would cost more.
        updated = (one for group in optimizer.param_groups for one in group["params"])
        self._parameters = [*dict.fromkeys([*model.parameters(), *updated])]
        self._retry = Retry(
            {"model": model, "loss": self.workload.loss, **(roots or {})},
            self.backend,
            self.position,
            optimizer=optimizer,
            extra_state=extra_state,
            allow_hidden_state=allow_hidden_state,
        )
        self._unreached = UnreachedWatch(model)
        self._commit = StepCommit(optimizer, self.backend, self.position)
        self.following = AfterUpdate(optimizer, self.backend, self.position)
        self._remember = remember
        self._put_back_of_caller: PutBack = _nothing
        self._window: list[_Batch] = []
        self._num_done = 0
        self.is_again = False
        self._is_asked = True  # whether the batches of the window may be cut, if they are

    def run(self, batch: Any, one_pass: OnePass, finish: Finish | None, loss_of: LossOf) -> None:
        """Accumulate the gradients of one more batch. If ``finish`` is given, also end the step with an update.

        Sets ``loss`` to the mean loss of this batch, ``events`` to its out-of-memory events and ``micro_batch`` to the
        samples per pass.

        Args:
            batch: the batch.
            one_pass: runs forward and backward of a micro-batch.
            finish: clips the gradients and updates the parameters; ``None`` if more batches of the window follow.
            loss_of: computes the loss of a micro-batch, to check whether the batch may be split.

        Raises:
            OutOfMemoryError: if memory ran out and no fallback is left; all batches of the step are undone.
            InputError: if the batch would have to be split, but this is not allowed or could change the result.
            DataError: if the batch has no targets.
        """
        shape = self._shape_of(batch)
        self._come_back(batch)
        with self._retry.undo.taken_back_on_error():
            fallback_schedule = self._fallback_schedule_for(shape.num_samples)
            self._fallback = fallback_schedule.choose(shape.elements_per_sample)
            if fallback_schedule.sizes[self._fallback].samples < shape.num_samples:
                # First, because without the techniques, the check whether the batch may be cut may not fit.
                attempt(partial(self._use, fallback_schedule.sizes[self._fallback].level), self.backend, self.position)
                self._is_asked = self._keep_whole(fallback_schedule, batch, loss_of, shape)
                self._fallback = fallback_schedule.choose(shape.elements_per_sample)
            refuse_recut(self._whole.reason(), fallback_schedule.sizes[self._fallback].samples, shape, Ranks())
        if not self._window:
            self._begin()
        self._window.append(_Batch(batch, shape, one_pass, loss_of))
        self._until_done(fallback_schedule, finish)
        samples = min(fallback_schedule.sizes[self._fallback].samples, shape.num_samples)
        memory = measured(fallback_schedule, self.backend, Ranks())
        fallback_schedule.held(self._fallback, math.ceil(samples * shape.elements_per_sample), memory)
        if finish is not None:
            self._end()

    def finish(self, finish: Finish) -> None:
        """End a step with an update, in a loop that separates the update from its last batch.

        Args:
            finish: clips the gradients and updates the parameters. If memory runs out in this function, the gradients
                are recomputed, and it is called again with `is_again` set to true.

        Raises:
            OutOfMemoryError: if memory ran out and no fallback is left; all batches of the step are undone.
        """
        assert self._fallback_schedule is not None, "an update without a batch"
        self._come_back()
        self._until_done(self._fallback_schedule, finish)
        self._end()

    def _until_done(self, fallback_schedule: FallbackSchedule, finish: Finish | None) -> None:
        """Run the pending batches and the update. If memory runs out, undo them and retry with the next fallback."""
        self.events, is_done = [], False
        known, self._second_fallback = fallback_schedule.state_dict(), None
        try:
            while not is_done:
                event = self._attempt(fallback_schedule.sizes[self._fallback], finish)
                is_done = event is None
                if event is not None:
                    self._put_back()
                    self._retry.refuse(event, Ranks())
                    asked = [
                        self._keep_whole(fallback_schedule, one.batch, one.loss_of, one.shape) for one in self._window
                    ]
                    self._is_asked = all(asked)
                    self._fallback = self._after_oom(event, self._fallback, known)
        finally:
            if not is_done:
                self._give_up()

    def metrics(self) -> dict[str, float]:
        """Return values to log, by name.

        These are the peak and current bytes in use, the samples per micro-batch and the number of survived errors.
        """
        use = self.backend.use()
        return {
            "plimsoll/peak_bytes": float(use.peak_bytes),
            "plimsoll/used_bytes": float(use.used_bytes),
            "plimsoll/micro_batch": float(self.micro_batch),
            "plimsoll/oom": float(self.num_ooms),
        }

    def forget(self) -> None:
        """Drop the batches and gradients of an unfinished window, for a loop that starts over."""
        if self._window:
            self._let_go()
            self._drop_gradients()

    def close(self) -> None:
        """Remove the techniques of the fallbacks from the model."""
        self._commit.forget()
        self._unreached.close()
        self._fallbacks.close()

    # -- one try -------------------------------------------------------------------------------------------------------

    def _attempt(self, size: Size, finish: Finish | None) -> OomEvent | None:
        self._commit.was_called, self._commit.outcome, self._commit.recovered = False, None, []
        event = attempt(partial(self._try, size, finish), self.backend, self.position)
        if event is None:
            self.events += self._commit.recovered
            self.num_ooms += len(self._commit.recovered)
        return self._commit.outcome or event

    def _try(self, size: Size, finish: Finish | None) -> None:
        self._use(size.level)
        self._ask_before_cut(size.samples)  # before the state is saved, because it changes parameters temporarily
        if not self._retry.undo.remembered:
            self._remember_window(size.samples)
        if finish is None:
            self._gradients(size.samples)
            self._retry.undo.pause()
            return
        with self._updating():
            finish(partial(self._all_gradients, size.samples))

    def _remember_window(self, samples: int) -> None:
        first, model = self._window[0], self.workload.model
        self._retry.remember(
            [one.batch for one in self._window],
            lambda: first.loss_of(first_samples(first.batch, samples, model), 1.0),
            self._parameters,
            self._put_back_of_caller,
        )

    def _all_gradients(self, samples: int) -> Tensor:
        """Compute the gradients of the batches that still have to run, and record that their passes succeeded.

        Return the mean loss of the last batch.
        """
        loss = self._gradients(samples)
        self._retry.observed()
        return loss

    def _use(self, level: int) -> None:
        # Not in the middle of a window, because its initial state could not be restored any more.
        if not self._num_done and not self._fallbacks.is_in_force(level):
            self.position.phase = "copy"
            self._commit.forget()
            self._retry.undo.forget()
            self._fallbacks.use(level)

    def _ask_before_cut(self, samples: int) -> None:
        """Check again whether pending batches may be split, if an earlier check ran out of memory.

        Raises:
            InputError: if one of them must not be split, but has more than ``samples`` samples.
        """
        waiting = [] if self._is_asked else self._window[self._num_done :]
        for one in waiting:
            if samples < one.shape.num_samples and _can_differ(one.shape):
                with self._retry.undo.as_failed():
                    reason = self.additivity.before_cut(one.batch, one.loss_of)
                refuse_recut(reason, samples, one.shape, Ranks())
        self._is_asked = True

    def _gradients(self, samples: int) -> Tensor:
        """Compute the gradients of the batches that still have to run, and return the mean loss of the last batch."""
        total = self._retry.until_settled(partial(self._passes, samples), self._put_back)
        self.position.phase = "clip"
        failpoint("clip")
        self.loss = total
        return total

    def _passes(self, samples: int) -> Tensor:
        total = self.loss
        self._unreached.begin()
        with self._retry.observing():
            for number in range(self._num_done, len(self._window)):
                total = self._passes_of(self._window[number], samples)
                self._num_done = number + 1
                if self.is_again:
                    self._retry.undo.again(self._num_done)
            self._retry.undo.passed()
        return total

    def _passes_of(self, one: _Batch, samples: int) -> Tensor:
        self.micro_batch = self.position.micro_batch = min(samples, one.shape.num_samples)
        total = torch.zeros((), device=self.workload.device)
        for micro_batch, share, _ in self._micro_batches(one.batch, samples, one.shape):
            self.position.phase = "forward"
            failpoint("forward")
            total = total + one.one_pass(micro_batch, share) * share
            failpoint("backward")
        return total

    def _micro_batches(self, batch: Any, samples: int, shape: Shape) -> Iterator[MicroBatch]:
        if shape.num_units:
            return weighted_micro_batches(batch, samples, shape, self.workload)
        return equal_micro_batches(batch, samples, shape.num_samples)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Make each call of ``optimizer.step()`` inside the block happen as a whole or not at all."""
        optimizer = self.workload.optimizer
        own, of_class = optimizer.__dict__.get("step"), optimizer.step
        is_inside = False

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            nonlocal is_inside
            if is_inside:  # a call from the commit, which updates the parameters part by part
                return of_class()
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self.position.phase = "optimizer"
            is_inside = True
            try:
                self._commit.step()
            finally:
                is_inside = False
            if self._commit.outcome is not None:
                raise _NotUpdated("the update does not fit")
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del optimizer.__dict__["step"]
            if own is not None:  # the counting wrapper of a learning-rate schedule
                optimizer.__dict__["step"] = own

    # -- before and after ----------------------------------------------------------------------------------------------

    def _come_back(self, batch: Any = None) -> None:
        """Record changes that the loop has made since the window's last batch, and save the state for the next batch.

        Raises:
            OutOfMemoryError: if memory runs out; all batches of the step are undone.
        """
        self.is_again = False
        if not self._window:
            return
        event = attempt_twice(partial(self._retry.undo.resume, batch), self.backend, self.position)
        if isinstance(event, OomEvent):
            self._give_up()
            raise OutOfMemoryError(
                f"memory ran out twice before a batch of step {event.step} could start ({event.shortage}); the earlier "
                "batches of this step are undone: give a larger budget"
            )

    def _give_up(self) -> None:
        """Restore the state from before the window, and drop the window."""
        self._put_back()
        self._retry.undo.settle(all_of_it=True)
        self._let_go()

    def _let_go(self) -> None:
        self._retry.undo.done()
        self._window, self._num_done = [], 0

    def _begin(self) -> None:
        self._put_back_of_caller = self._remember()
        self._drop_gradients()

    def _end(self) -> None:
        self._let_go()
        self._put_back_of_caller = _nothing
        self.position.step += 1
        self._unreached.look(self.position.step)
        self.following.do(tidy_ups=self.workload.hooks.after_step)

    def _put_back(self) -> None:
        self._num_done, self.is_again = 0, True
        self._retry.put_back(self._put_back_own)
        self.backend.release()

    def _put_back_own(self) -> None:
        self._drop_gradients()
        self._commit.forget()
        self._put_back_of_caller()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _shape_of(self, batch: Any) -> Shape:
        if self._takes_any:
            return shape_of_any(batch, self.workload.units)
        if self._units_are_assumed:
            refuse_unclear_labels(batch)
        shape = shape_of(batch, self.workload)
        refuse_no_target(shape, self.position.step + 1)
        return shape

    def _fallback_schedule_for(self, num_samples: int) -> FallbackSchedule:
        """Return the fallback schedule for a batch of ``num_samples``.

        A batch larger than all earlier batches gets a new schedule, which inherits the known memory limits.
        """
        self._fallback_schedule = fallback_schedule_of(
            self._fallbacks,
            self._fallback_schedule,
            num_samples,
            first_micro_batch=self._first_micro_batch,
            grow_after=self._grow_after,
            is_whole=self._whole.reason() is not None,
        )
        return self._fallback_schedule

    def _keep_whole(self, fallback_schedule: FallbackSchedule, batch: Any, loss_of: LossOf, shape: Shape) -> bool:
        """Exclude fallbacks that split batches if ``batch`` must stay whole.

        Returns:
            Whether it is known if the batch may be split (see `InstalledFallbacks.keep_whole`).
        """
        reason = partial(self.additivity.before_cut, batch, loss_of)
        with self._retry.undo.as_failed():
            return not _can_differ(shape) or self._fallbacks.keep_whole(fallback_schedule, self._whole, reason, shape)

    def _after_oom(self, event: OomEvent, fallback: int, known: dict[str, Any]) -> int:
        """Record an out-of-memory event, and return the index of the next fallback.

        ``known`` is the state of the fallback schedule from before the step.

        Raises:
            OutOfMemoryError: if no fallback is left.
        """
        assert self._fallback_schedule is not None
        largest = max((one.shape for one in self._window), key=lambda shape: shape.num_samples)
        largest = largest._replace(elements_per_sample=max(one.shape.elements_per_sample for one in self._window))
        event, following = after_oom(event, fallback, largest, self._fallback_schedule, self._fallbacks, self.backend)
        self._second_fallback = following if self._second_fallback is None else self._second_fallback
        if following is None and self._retry.undo.leave():
            following = self._fallback_schedule.begin_again(
                known, fallback if self._second_fallback is None else self._second_fallback
            )
        self.num_ooms += 1
        self.events.append(event)
        if following is None:
            samples = min(self._fallback_schedule.sizes[fallback].samples, largest.num_samples)
            raise OutOfMemoryError(no_way_out(event, samples, largest, self._whole.reason()))
        return following


def _can_differ(shape: Shape) -> bool:
    """Return whether splitting a batch may change its loss, that is, whether it has several samples and a target."""
    return shape.num_samples > 1 and bool(shape.num_units)


def _refuse_techniques(
    fallbacks: Sequence[Configuration | Sequence[Choice]], micro_batch: int | None, possible: frozenset[str]
) -> None:
    if fallbacks and micro_batch is not None:
        raise InputError(
            f"micro_batch={micro_batch} was given with {len(fallbacks)} fallbacks, which set the micro-batch "
            "themselves: leave one of the two out"
        )
    others = sorted({choice.technique for one in fallbacks for choice in choices_of(one)} - possible)
    if others:
        raise InputError(
            f"the plan has {', '.join(others)}, which cannot be used in a loop that has its own loss, precision and "
            f"optimizer: leave it out with `--forbid {others[0]}`, or use plimsoll.TrainStep, which accepts any plan"
        )
