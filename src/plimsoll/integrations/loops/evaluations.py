"""The evaluations of a Trainer inside a budget: batches are split, and collected outputs are kept off the device.

A batch that runs out of memory is predicted again in smaller micro-batches if its loss is additive
(`plimsoll.step.losses.additive`), or if no loss is computed. Logits and labels of all batches are kept in memory that
the budget does not count (`plimsoll.integrations.loops.collected_outputs`). If a function of the user, such as
``compute_metrics``, runs out of memory, it is not repeated; the error names the function and a remedy.

While an evaluation runs, transformers' container class is replaced for all trainers of the process. Not handled: a
subclass whose ``evaluation_loop`` collects outputs in another container.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plimsoll.data.batch import batch_size_of, split_batch
from plimsoll.device.base import Backend
from plimsoll.device.mapped_memory import MappedPool
from plimsoll.errors import OutOfMemoryError
from plimsoll.integrations.loops.attributes import attributes
from plimsoll.integrations.loops.batches import joined
from plimsoll.integrations.loops.collected_outputs import Collected, off_device, pool_for
from plimsoll.models.workload import Reason
from plimsoll.records.run import OomEvent
from plimsoll.records.units import format_bytes
from plimsoll.step.fallbacks import after_oom
from plimsoll.step.losses.additive import LossOf
from plimsoll.step.micro_batches import Shape, no_way_out, shape_of_any
from plimsoll.step.oom_boundary import Position, attempt, fitting
from plimsoll.step.recovery import FallbackSchedule, micro_batch_sizes

_FEWER = (
    ", or preprocess_logits_for_metrics, which keeps less of each batch (such as lambda logits, labels: "
    "logits.argmax(-1)), or set batch_eval_metrics=True; the training state is unchanged"
)


class Evaluations:
    """The wrapped evaluation methods of one trainer.

    Args:
        trainer: the trainer.
        backend: backend of its device.
        units_of: returns the number of units that the mean loss of a batch averages over.
        refuse_unclear: raises if the units of a batch are unknown.
        why_whole: returns the reason why a batch must not be split; ``None`` if it may be split. Its arguments are the
            batch and a function that computes the loss of a micro-batch.
        note: called with the out-of-memory events from which an evaluation has recovered.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        backend: Backend,
        *,
        units_of: Callable[[Any], float],
        refuse_unclear: Callable[[Any], None],
        why_whole: Callable[[Any, LossOf], Reason | None],
        note: Callable[[list[OomEvent]], None],
    ) -> None:
        self._trainer, self._backend, self._note = trainer, backend, note
        self._units_of, self._refuse_unclear, self._why_whole = units_of, refuse_unclear, why_whole
        self._fallback_schedule: FallbackSchedule | None = None
        self._first_elements: float | None = None
        self._pool: MappedPool | None = None
        self.items: Any = None
        """``num_items_in_batch`` of the current micro-batch; ``None`` leaves it to the trainer to count them."""

    def begin_with(self, num_elements: float) -> None:
        """Start with micro-batches of at most ``num_elements`` elements, the size of a training pass in the plan."""
        self._first_elements = num_elements

    def wrapped(self) -> dict[str, Any]:
        """Return the wrapped methods by their names in the trainer."""
        trainer = self._trainer
        found: dict[str, Any] = {
            "prediction_step": self._wrapped_prediction(trainer.prediction_step),
            "evaluation_loop": self._wrapped_loop(trainer.evaluation_loop),
        }
        if trainer.compute_metrics is not None:
            found["compute_metrics"] = self._wrapped_metrics(trainer.compute_metrics)
        if trainer.preprocess_logits_for_metrics is not None:
            found["preprocess_logits_for_metrics"] = self._wrapped_preprocess(trainer.preprocess_logits_for_metrics)
        return found

    def _wrapped_loop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def evaluation_loop(*arguments: Any, **options: Any) -> Any:
            with self._collecting():
                return fitting(
                    partial(original, *arguments, **options),
                    self._backend,
                    "reading the batches of an evaluation and putting their predictions together",
                    f", a smaller per_device_eval_batch_size{_FEWER}",
                )

        return evaluation_loop

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        self._pool = pool_for(self._trainer.args.device)
        container = partial(Collected, pool=self._pool)
        try:
            with attributes(transformers.trainer, {"EvalLoopContainer": container}):
                yield
        finally:
            self._pool = None  # the files stay until their tensors are freed

    def _wrapped_metrics(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def compute_metrics(prediction: Any, *arguments: Any, **options: Any) -> Any:
            what = f"computing metrics of predictions of {_size(prediction.predictions)} (compute_metrics)"
            work = partial(original, prediction, *arguments, **options)
            return fitting(work, self._backend, what, _FEWER)

        return compute_metrics

    def _wrapped_preprocess(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def preprocess_logits_for_metrics(logits: Any, *arguments: Any, **options: Any) -> Any:
            what = f"preprocessing the logits of a batch, {_size(logits)} (preprocess_logits_for_metrics)"
            work = partial(original, logits, *arguments, **options)
            otherwise = " or a smaller per_device_eval_batch_size; the training state is unchanged"
            return fitting(work, self._backend, what, otherwise)

        return preprocess_logits_for_metrics

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _wrapped_prediction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def prediction_step(
            model: nn.Module,
            inputs: Any,
            prediction_loss_only: bool,
            ignore_keys: list[str] | None = None,
            **options: Any,
        ) -> Any:
            def predicted(micro_batch: Any) -> Any:
                return original(model, micro_batch, prediction_loss_only, ignore_keys, **options)

            return self._predicted(predicted, inputs)

        return prediction_step

    def _predicted(self, predicted: Callable[[Any], Any], inputs: Any) -> Any:
        """Return loss, logits and labels of a batch. If memory runs out and the loss is additive, split the batch."""
        why_whole = cache(partial(self._why_whole, inputs, partial(self._loss_of, predicted, inputs)))
        shape = shape_of_any(inputs, "samples")
        fallback_schedule = self._fallback_schedule_for(shape)
        fallback = fallback_schedule.choose(shape.elements_per_sample)
        random_state = self._backend.random_state()
        while True:
            size = min(fallback_schedule.sizes[fallback].samples, shape.num_samples)
            if size < shape.num_samples and why_whole() is not None:
                size = shape.num_samples
            position = Position(self._trainer.state.global_step, "evaluation", size)
            found = attempt(partial(self._in_micro_batches, predicted, inputs, size, shape), self._backend, position)
            if not isinstance(found, OomEvent):
                fallback_schedule.held(fallback, math.ceil(size * shape.elements_per_sample))
                return found
            self._backend.release()
            self._backend.restore_random_state(random_state)
            event, following = after_oom(found, fallback, shape, fallback_schedule, None, self._backend)
            if following is None or (following != fallback and why_whole() is not None):
                whole = why_whole() if size > 1 else None
                otherwise = "" if whole is None else ", or a smaller per_device_eval_batch_size"
                raise OutOfMemoryError(f"{no_way_out(event, size, shape, whole)}{otherwise}")
            self._note([event])
            fallback = following

    def _fallback_schedule_for(self, shape: Shape) -> FallbackSchedule:
        if self._fallback_schedule is None or self._fallback_schedule.sizes[0].samples < shape.num_samples:
            self._fallback_schedule = FallbackSchedule(micro_batch_sizes(shape.num_samples))
            if self._first_elements is not None:
                self._fallback_schedule.start_at(max(1, int(self._first_elements / shape.elements_per_sample)))
        return self._fallback_schedule

    def _loss_of(self, predicted: Callable[[Any], Any], inputs: Any, micro_batch: Any, share: float) -> Tensor:
        """Return the loss of a micro-batch that has the fraction ``share`` of the batch's items.

        Returns NaN if the trainer computes no loss.
        """
        items = self._num_items(inputs)
        loss = self._with_items(None if items is None else items * share, predicted, copy.copy(micro_batch))[0]
        return torch.tensor(torch.nan) if loss is None else loss.mean()

    def _num_items(self, inputs: Any) -> Any:
        return self._trainer._get_num_items_in_batch([inputs], self._trainer.args.device)

    def _with_items(self, items: Any, predicted: Callable[[Any], Any], micro_batch: Any) -> tuple[Any, Any, Any]:
        self.items = items
        try:
            found: tuple[Any, Any, Any] = predicted(micro_batch)
            return found
        finally:
            self.items = None

    def _in_micro_batches(
        self, predicted: Callable[[Any], Any], inputs: Any, num_samples: int, shape: Shape
    ) -> tuple[Any, Any, Any]:
        """Predict a batch in micro-batches of ``num_samples``, and return its joined loss, logits and labels.

        For the loss of a micro-batch, ``num_items_in_batch`` is reduced to the number of its own items.
        """
        if num_samples == shape.num_samples:
            whole: tuple[Any, Any, Any] = predicted(inputs)
            return whole
        micro_batches = split_batch(inputs, num_samples)
        units = [self._units_of(micro_batch) for micro_batch in micro_batches]
        units = units if any(units) else [*map(batch_size_of, micro_batches)]
        items, found = self._num_items(inputs), []
        for micro_batch, count in zip(micro_batches, units, strict=True):
            own_items = items * count / sum(units) if items is not None and count else None
            loss, logits, labels = self._with_items(own_items, predicted, micro_batch)
            if loss is not None:
                self._refuse_unclear(micro_batch)
            if self._pool is not None:
                logits, labels = off_device(logits, self._pool), off_device(labels, self._pool)
            found.append((loss, logits, labels))
        return joined(found, units, self._pool)


def _size(predictions: Any) -> str:
    """Return the dtypes, shapes and total size of predictions as text for a message."""
    arrays = [leaf for leaf in tree_leaves(predictions) if hasattr(leaf, "nbytes")]
    shapes = ", ".join(
        f"{str(one.dtype).removeprefix('torch.')}[{', '.join(map(str, one.shape))}]" for one in arrays[:3]
    )
    return f"{shapes}, {format_bytes(sum(int(one.nbytes) for one in arrays))}"
