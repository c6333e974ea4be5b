"""Validation, testing and prediction of a Lightning trainer inside a budget; batches are split if no result changes.

A ``validation_step`` may log any function of a batch, so it is not known whether micro-batches log the same values. So
if a batch runs out of memory, a few of its samples are run once together and once in two passes. Logged values, states
of metrics, outputs and lists of the module are compared, once for each kind of batch (fields, padding and labels). If
all are equal, the batch is run in smaller micro-batches. Otherwise it is not split, and the error names the difference.
If memory runs out outside of a step (in a hook, a loader or a checkpoint), the error names the stage.

Not handled: steps that take an iterator, and changes by a step to anything except logs, metrics and lists of the
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from plimsoll.data.batch import batch_size_of, pick_samples, split_batch
from plimsoll.device.base import backend_for
from plimsoll.errors import OutOfMemoryError
from plimsoll.integrations.loops.attributes import attributes
from plimsoll.integrations.loops.lightning_logs import joined_values, remember, state_of
from plimsoll.records.run import OomEvent
from plimsoll.records.units import parse_bytes
from plimsoll.step.fallbacks import after_oom
from plimsoll.step.losses.probe_samples import Kinds, first_rows, telling_rows
from plimsoll.step.micro_batches import Shape, shape_of_any
from plimsoll.step.oom_boundary import Position, attempt, fitting
from plimsoll.step.recovery import FallbackSchedule, micro_batch_sizes

_STEPS = ("validation_step", "test_step", "predict_step")
_COMPARED = (8, 4, 2)  # samples; fewer if more do not fit


class Evaluations:
    """The evaluation steps of one trainer, which are wrapped until `close` is called.

    Args:
        trainer: a trainer with one process.
        module: its module.
        budget: device memory that is enforced during evaluations outside of training, such as ``"8GiB"``; ``None`` for
            no limit.
        never_cut: keep every batch whole.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, budget: str | int | None, never_cut: bool) -> None:
        self._trainer, self._module, self._budget, self._never_cut = trainer, module, budget, never_cut
        self._backend = backend_for(str(trainer.strategy.root_device))
        self._metrics = [one for one in module.modules() if isinstance(one, Metric)]
        self._fallback_schedules: dict[str, FallbackSchedule] = {}
        self._reasons: dict[str, str | None] = {}
        self._kinds: dict[str, Kinds] = {}
        self.events: list[OomEvent] = []
        self._stack, self._sanity = ExitStack(), ExitStack()
        steps = {name: partial(self._step, name, getattr(trainer.strategy, name)) for name in _STEPS}
        self._stack.enter_context(attributes(trainer.strategy, steps))
        run_stage = partial(self._run_stage, trainer._run_stage)
        self._stack.enter_context(attributes(trainer, {"_run_stage": run_stage}))

    def close(self) -> None:
        """Restore the original methods of the trainer."""
        self._sanity.close()
        self._stack.close()

    def limit_sanity_check(self) -> None:
        """Enforce the budget during the sanity check, which runs before the plan is made."""
        self._sanity.enter_context(self._limited())

    def end_sanity_check(self) -> None:
        """Stop enforcing the budget after the sanity check."""
        self._sanity.close()

    def _limited(self) -> Any:
        return nullcontext() if self._budget is None else self._backend.limited(parse_bytes(self._budget))

    def _run_stage(self, original: Callable[[], Any]) -> Any:
        stage = self._trainer.state.fn
        with nullcontext() if stage == "fit" else self._limited():
            outcome = attempt(original, self._backend, Position())
        if not isinstance(outcome, OomEvent):
            return outcome
        name = getattr(self._trainer.state.stage, "value", stage)
        raise OutOfMemoryError(
            f"memory ran out in Lightning's stage {name!r}, outside of a step ({outcome.shortage}), in a hook, loader "
            "or checkpoint: the parameters are as they were after the last step; keep less of each batch (a metric "
            "of torchmetrics in place of a list of outputs), or give a larger budget"
        )

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _step(self, name: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a step on a batch. If memory runs out, and splitting changes no result, use smaller micro-batches."""
        if not arguments or isinstance(arguments[0], Iterator):
            what = f"in {name}, which takes an iterator and cannot be repeated"
            return fitting(partial(original, *arguments, **options), self._backend, what, "")
        batch, others = arguments[0], arguments[1:]

        def run(micro_batch: Any) -> Any:
            return original(micro_batch, *others, **options)

        shape = shape_of_any(batch, "samples")
        may_cut = cache(partial(self._may_cut, name, run, batch))
        fallback_schedule = self._fallback_schedule_for(name, shape)
        fallback = fallback_schedule.choose(shape.elements_per_sample)
        while True:
            size = min(fallback_schedule.sizes[fallback].samples, shape.num_samples)
            if size < shape.num_samples and not may_cut():
                size = shape.num_samples
            put_back = self._remember()
            position = Position(self._trainer.global_step, "evaluation", size)
            found = attempt(partial(self._in_micro_batches, run, batch, size, shape), self._backend, position)
            if not isinstance(found, OomEvent):
                fallback_schedule.held(fallback, math.ceil(size * shape.elements_per_sample))
                return found
            put_back()
            event, following = after_oom(found, fallback, shape, fallback_schedule, None, self._backend)
            self.events.append(event)
            if following is None or (following != fallback and not may_cut()):
                raise self._error(name, event, size, shape, following)
            fallback = following

    def _fallback_schedule_for(self, name: str, shape: Shape) -> FallbackSchedule:
        fallback_schedule = self._fallback_schedules.get(name)
        if fallback_schedule is None or fallback_schedule.sizes[0].samples < shape.num_samples:
            fallback_schedule = self._fallback_schedules[name] = FallbackSchedule(micro_batch_sizes(shape.num_samples))
        return fallback_schedule

    def _error(
        self, name: str, event: OomEvent, num_samples: int, shape: Shape, following: int | None
    ) -> OutOfMemoryError:
        reason = self._reasons.get(name)
        smaller = max(1, shape.num_samples // 2)
        why = f"; it was not cut, because {reason}" if following is not None and reason else ""
        remedy = (
            "give its loader shorter texts" if num_samples == 1 else f"give its loader batch_size={smaller} or less"
        )
        return OutOfMemoryError(
            f"memory ran out in {name} with {num_samples} samples of a batch of {shape.num_samples} "
            f"({event.shortage}){why}: the training state is unchanged; {remedy}, or give a larger budget"
        )

    def _remember(self) -> Callable[[], None]:
        """Return a function that undoes a step: it restores logs, metrics, lists of the module and the random state."""
        results, random_state = self._trainer._results, self._backend.random_state()
        logs = remember({} if results is None else results, self._metrics)
        lists = [(owner, name, value, [*value]) for owner, name, value in self._lists()]

        def put_back() -> None:
            logs()
            for _, _, value, before in lists:
                value[:] = before
            self._backend.release()
            self._backend.restore_random_state(random_state)

        return put_back

    def _lists(self) -> list[tuple[str, str, list[Any]]]:
        """Return the lists in attributes of all submodules, such as validation outputs, with their names."""
        return [
            (prefix, name, value)
            for prefix, module in self._module.named_modules()
            if not isinstance(module, Metric)
            for name, value in vars(module).items()
            if isinstance(value, list)
        ]

    def _in_micro_batches(self, run: Callable[[Any], Any], batch: Any, num_samples: int, shape: Shape) -> Any:
        if num_samples == shape.num_samples:
            return run(batch)
        return self._joined(run, split_batch(batch, num_samples))

    def _joined(self, run: Callable[[Any], Any], micro_batches: Sequence[Any]) -> Any:
        sizes, found = [batch_size_of(micro_batch) for micro_batch in micro_batches], []
        for micro_batch in micro_batches:
            with self._logging(micro_batch):
                found.append(run(micro_batch))
        return joined_values(found, [float(size) for size in sizes], sizes)

    @contextmanager
    def _logging(self, micro_batch: Any) -> Iterator[None]:
        """Make ``self.log`` infer the number of samples from a micro-batch inside the block."""
        results = self._trainer._results
        if results is None:
            yield
            return
        before = results.batch, results.batch_size
        results.batch, results.batch_size = micro_batch, None
        try:
            yield
        finally:
            results.batch, results.batch_size = before

    # -- whether a cut changes anything --------------------------------------------------------------------------------

    def _may_cut(self, name: str, run: Callable[[Any], Any], batch: Any) -> bool:
        if self._never_cut:
            self._reasons[name] = "never_cut=True forbids it"
        kinds = self._kinds.setdefault(name, Kinds())
        new = kinds.new_in(batch)
        if self._reasons.get(name) is None and (name not in self._reasons or new):
            self._reasons[name] = self._compared(run, batch, kinds, new)
        return self._reasons[name] is None

    def _compared(self, run: Callable[[Any], Any], batch: Any, kinds: Kinds, new: frozenset[Any]) -> str | None:
        """Compare passes of a few samples, as many as fit in memory.

        Return why the batch must not be split; ``None`` if it may be split.
        """
        for num_samples in _COMPARED:
            few = pick_samples(batch, telling_rows(batch, num_samples, first_rows(batch, new, num_samples // 2)))
            work = partial(self._reason_against, run, few)
            reason = attempt(work, self._backend, Position(self._trainer.global_step, "evaluation", num_samples))
            if not isinstance(reason, OomEvent):
                kinds.note(new, few)
                return reason
        return f"not even {_COMPARED[-1]} of its samples fit, so the results of micro-batches cannot be compared"

    def _reason_against(self, run: Callable[[Any], Any], few: Any) -> str | None:
        """Run a few samples together, then in two unequal passes, and undo both.

        Return a description of the first difference between the results; ``None`` if they are equal.
        """
        num_samples = batch_size_of(few)
        put_back = self._remember()
        try:
            whole = self._traces(partial(self._joined, run, [few]))
            put_back()
            cut = self._traces(
                partial(self._joined, run, [pick_samples(few, [0]), pick_samples(few, range(1, num_samples))])
            )
        finally:
            put_back()
        for what, value in whole.items():
            if not _is_close(value, cut.get(what)):
                return f"{what} changes when {num_samples} of its samples are run in two passes"
        return None

    def _traces(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Run a pass. Return its output and its other effects in a dict, whose keys describe them for messages."""
        before = {(owner, name): len(value) for owner, name, value in self._lists()}
        returned = work()
        kept = {
            f"the list {name} of the module, which the step appends to,": math.nan  # NaN never compares equal
            for owner, name, value in self._lists()
            if len(value) != before.get((owner, name), 0)
        }
        results: dict[str, Any] = self._trainer._results or {}
        logged = {f"the logged value {key.split('.')[-1]!r}": _logged(result) for key, result in results.items()}
        states = {f"the state of the metric {type(one).__name__}": _totals(one) for one in self._metrics}
        return {"the output of the step": returned, **kept, **logged, **states}


def _logged(result: Any) -> Any:
    """Return the value of a logged ``result``, to be compared between passes.

    Returns ``None`` for a metric, whose state is compared separately. Returns NaN, which equals nothing, for a value
    logged per batch, because each micro-batch would overwrite it.
    """
    if not result.is_tensor:
        return None  # a metric, whose state is compared separately
    return result.compute() if result.meta.on_epoch else math.nan


def _totals(metric: Metric) -> dict[str, Any]:
    state = state_of(metric)
    names = [name for name in metric._defaults if name in state]
    return {name: torch.cat([*state[name]]) if _is_tensors(state[name]) else state[name] for name in names}


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Tensor) and one.ndim for one in value)


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_close(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_is_close(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
