"""The mean loss over batches, computed without gradients in micro-batches as large as fit.

A batch that runs out of memory is evaluated again in smaller micro-batches. Nothing has to be undone, because an
evaluation changes nothing. Techniques may limit the size of micro-batches (`plimsoll.techniques.evaluation`). Ranks
that train the same model share each batch as in training. If a batch does not fit on one rank, all ranks split their
parts. Every rank gets the mean loss of the whole batch.

Not handled: memory that runs out while a batch is read, because an iterator cannot return the same batch again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plimsoll.data.batch import move_batch
from plimsoll.device.base import Backend
from plimsoll.distributed.ranks import PeerOutOfMemory
from plimsoll.errors import DataError, OutOfMemoryError
from plimsoll.models.workload import Workload
from plimsoll.records.run import OomEvent
from plimsoll.step.checks import refuse_recut
from plimsoll.step.collective import attempt_collectively, told_by_all
from plimsoll.step.failpoints import failpoint
from plimsoll.step.losses.additive import Additivity
from plimsoll.step.micro_batches import Filler, Shape, autocast, no_way_out, parts_of_all, weighted_micro_batches
from plimsoll.step.oom_boundary import Position
from plimsoll.step.rank_buffers import share_statistics
from plimsoll.step.recovery import FallbackSchedule, action_of, micro_batch_sizes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: the mean loss over the ``num_units`` units of ``num_samples`` samples."""

    loss: float
    num_samples: int
    num_units: int | float
    oom_events: tuple[OomEvent, ...]


class Evaluator:
    """The evaluation of one workload. It remembers which micro-batch sizes fit.

    Args:
        workload: the workload to evaluate.
        backend: the backend of the device.
        position: the current position of the run, for error records.
        shape_of: counts the samples and units of a batch, and refuses a batch that cannot be split.
        grow_after: number of successful batches after which the next larger size is tried.
        additivity: decides whether a batch may be split.
    """

    def __init__(  # noqa: PLR0917 -- internal, constructed by the step only
        self,
        workload: Workload,
        backend: Backend,
        position: Position,
        shape_of: Callable[[Any], Shape],
        grow_after: int,
        additivity: Additivity,
    ) -> None:
        self._workload = workload
        self._backend = backend
        self._position = position
        self._shape_of = shape_of
        self._grow_after, self._additivity = grow_after, additivity
        self._ranks = workload.ranks
        self._fallback_schedule: FallbackSchedule | None = None
        self._first_samples: int | None = None

    def begin_at(self, num_samples: int) -> None:
        """Start with micro-batches of at most ``num_samples``, the size with which training starts or is resumed."""
        self._fallback_schedule, self._first_samples = None, num_samples

    def at_once(self, num_samples: int) -> int:
        """Return the size of the micro-batch that is tried first for a batch of ``num_samples``."""
        fallback_schedule = self._fallback_schedule_for(num_samples)
        return min(
            fallback_schedule.sizes[fallback_schedule.in_force].samples,
            self._workload.hooks.evaluation_samples or num_samples,
        )

    def evaluate(self, batches: Iterable[Any], prepare: Callable[[], list[OomEvent]] = list) -> Evaluation:
        """Return the mean loss over ``batches``, without gradients. Training flags and random state are restored.

        Args:
            batches: the batches. With several ranks, each rank's part of every batch, or ``{}`` if it has no samples. A
                rank without further batches takes part until all ranks have finished.
            prepare: called first. Returns the out-of-memory events from which it recovered.

        Raises:
            OutOfMemoryError: if not even single samples fit.
            DataError: if no sample has a target.
        """
        was_training = [module for module in self._workload.model.modules() if module.training]
        random_state = self._backend.random_state()
        phase, self._position.phase = self._position.phase, "evaluation"
        try:
            events = prepare()
            share_statistics(self._workload.model, self._ranks)
            self._workload.model.eval()
            # `torch.inference_mode` saves no more memory. Tensors that a module caches in its first forward (a mask,
            # rotary positions) would be inference tensors, which the next step cannot save for backward.
            with torch.no_grad():
                return self._evaluate(batches, events)
        finally:
            for module in was_training:
                module.training = True
            self._backend.restore_random_state(random_state)
            self._position.phase = phase

    def _evaluate(self, batches: Iterable[Any], events: list[OomEvent]) -> Evaluation:
        loss_sum, num_samples = torch.zeros(1, dtype=torch.float64), 0
        num_units: int | float = 0
        for batch in self._read(batches):
            own = self._shape_of(batch)
            shape, num_samples_of_all, some_have_none = parts_of_all(own, self._ranks)
            if not num_samples_of_all and not self._ranks.is_alone:
                break  # no rank has another batch
            num_samples += num_samples_of_all
            if not shape.num_units:
                continue  # no sample has a target
            filler = Filler(self._workload, is_lent=some_have_none)
            loss_sum += self._loss_of(batch, own, shape, events, filler) * shape.num_units
            num_units += shape.num_units
        if not num_units:
            raise DataError(
                f"there is nothing to evaluate: none of {num_samples} samples has a target; give at least one with a "
                "target"
            )
        return Evaluation(self._ranks.add_up(loss_sum).item() / num_units, num_samples, num_units, tuple(events))

    def _read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches. With several ranks, then yield empty batches forever, so that no rank ends early.

        If memory runs out on one rank while it reads a batch, all ranks raise an error here. The caller may then repeat
        the evaluation.

        Raises:
            PeerOutOfMemory: on all ranks, if there are several.
        """
        if self._ranks.is_alone:
            yield from batches
            return
        iterator = iter(batches)
        while True:
            batch = attempt_collectively(partial(next, iterator, {}), self._backend, self._position, self._ranks)
            if isinstance(batch, OomEvent):
                told = told_by_all(batch, self._ranks)
                what = f"memory ran out on rank {told.rank} while a batch was read: {told.raw_text}"
                raise PeerOutOfMemory(told.rank, what)
            yield batch

    def _loss_of(self, batch: Any, own: Shape, shape: Shape, events: list[OomEvent], filler: Filler) -> float:
        """Return this rank's contribution to the mean loss of a batch.

        The batch is evaluated in micro-batches as large as fit on all ranks. Out-of-memory events are appended to
        ``events``.
        """
        if self._fallback_schedule is None or self._fallback_schedule.sizes[0].samples < shape.num_samples:
            self._fallback_schedule = self._fallback_schedule_for(shape.num_samples)
        fallback_schedule = self._fallback_schedule
        fallback = fallback_schedule.choose(shape.elements_per_sample)
        most = min(shape.num_samples, self._workload.hooks.evaluation_samples or shape.num_samples)
        while True:
            size, whole = min(fallback_schedule.sizes[fallback].samples, most), None
            is_cut = size < shape.num_samples or not self._ranks.is_alone
            if is_cut and (whole := self._additivity.before_cut(batch)) is not None:
                size = most = shape.num_samples
                refuse_recut(whole, size, shape, self._ranks)
            self._position.micro_batch = size
            loss = attempt_collectively(
                partial(self._forward_only, batch, size, own, shape, filler), self._backend, self._position, self._ranks
            )
            num_elements = math.ceil(size * shape.elements_per_sample)
            if not isinstance(loss, OomEvent):
                fallback_schedule.held(fallback, num_elements)
                return loss
            self._workload.hooks.sharding.reset()
            self._backend.release()
            loss = told_by_all(loss, self._ranks)
            following = fallback_schedule.failed(fallback, size, num_elements)
            if following is None or whole is not None:
                raise OutOfMemoryError(no_way_out(loss, size, shape, whole))
            if fallback_schedule.is_last(following):
                self._backend.release(last_resort=True)
            next_size = min(fallback_schedule.sizes[following].samples, most)
            action = action_of(size, next_size, None, is_same_fallback=following == fallback)
            events.append(loss.model_copy(update={"next_micro_batch": next_size, "action": action}))
            fallback = following

    def _fallback_schedule_for(self, num_samples: int) -> FallbackSchedule:
        fallback_schedule = FallbackSchedule(micro_batch_sizes(num_samples), self._grow_after)
        fallback_schedule.start_at(self._first_samples or num_samples)
        return fallback_schedule

    def _forward_only(self, batch: Any, micro_batch: int, own: Shape, shape: Shape, filler: Filler) -> float:
        total = torch.zeros((), device=self._workload.device)
        micro_batches = weighted_micro_batches(batch, micro_batch, own, self._workload, shape.num_units)
        if self._workload.hooks.sharding.is_sharded:
            micro_batches = filler.filled(micro_batches, -(-shape.num_samples // micro_batch))
        for part, share, numbers in micro_batches:
            self._position.samples = numbers
            failpoint("evaluation")
            on_device = move_batch(part, self._workload.device)
            with autocast(self._workload):
                total += self._workload.loss(self._workload.model, on_device).float() * share
        return total.item()
