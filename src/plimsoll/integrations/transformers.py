"""Hugging Face's `Trainer`, whose steps survive running out of memory: nothing lost, nothing done twice.

    trainer = transformers.Trainer(model, args, train_dataset=dataset)
    plimsoll.transformers.fit(trainer, budget="8GiB")        # in place of trainer.train()

The trainer stays what it is: its loop, loss, accumulation, logs, callbacks, schedules and checkpoints. Three of its
calls are wrapped while it trains:

- ``training_step``: where memory runs out, the gradients of the accumulation window are dropped, random numbers and
  buffers put back as they were at its begin, and its batches done again in smaller pieces. A piece counts as much as it
  has of what the batch's loss averages over, or of ``num_items_in_batch`` where the trainer divides by that.
- ``optimizer.step``: the whole update or none of it (`plimsoll.run.commit`).
- ``prediction_step``: evaluated in smaller pieces, and put together again.

With a budget the fastest mix of techniques that fits is planned and installed while it trains, its fallbacks are what
follows where memory runs out, and the budget is enforced. ``auto_find_batch_size`` has nothing to do then: it begins
the whole training again with another batch size, and keeps the weights of the first try.

Does NOT cover several processes or devices (torchrun's ranks would wait for each other: `plimsoll train --nproc`),
DeepSpeed, memory that runs out while the next batch is collated, and trainers of which ``training_step`` computes no
loss by ``compute_loss``. Written for transformers 5.23 and tested with it; the names it needs are checked.

Source: https://huggingface.co/docs/transformers/main_classes/trainer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from plimsoll.device.base import backend_for
from plimsoll.errors import InputError, OutOfMemoryError
from plimsoll.integrations._inputs import joined, only_loss, units_of
from plimsoll.integrations._planned import planned
from plimsoll.integrations.training_arguments import to_training_arguments
from plimsoll.records.plan import Plan
from plimsoll.records.run import OomEvent
from plimsoll.records.units import parse_bytes
from plimsoll.run.boundary import Position, attempt
from plimsoll.run.commit import StepCommit
from plimsoll.run.pieces import Shape, no_way_out
from plimsoll.run.recover import Ladder, Size, micro_batch_sizes
from plimsoll.run.rungs import Rungs, after_oom
from plimsoll.run.undo import Undo
from plimsoll.techniques._whole import WholeBatch
from plimsoll.workload import (
    Precision,
    Units,
    Workload,
    batch_size_of,
    count_elements,
    count_units,
    model_loss,
    split_batch,
)

_NEEDED = ("training_step", "prediction_step", "compute_loss", "create_optimizer", "log", "get_train_dataloader")
# What changes the model alone: the loop, the optimizer and the precision are the trainer's.
_OFFERED = {"micro_batch", "checkpointing", "activation_offload", "attention", "time_segments", "heap", "cache"}
_UPDATE_TRIES = 2  # of an update that nothing of has happened, with everything freed in between


@dataclass(slots=True)
class Protection:
    """What happened while a trainer was protected: ``events`` are the times that memory ran out and was survived."""

    events: list[OomEvent] = field(default_factory=list)
    micro_batch: int | None = None
    plan: Plan | None = None


def fit(
    trainer: transformers.Trainer,
    *train_arguments: Any,
    budget: str | int | None = None,
    units: Units | None = None,
    batch: Any = None,
    on_oom: Callable[[OomEvent], None] | None = None,
    **train_options: Any,
) -> TrainOutput:
    """Call ``trainer.train(...)`` so that running out of memory loses nothing.

    Args:
        trainer: a `transformers.Trainer`, or a subclass.
        train_arguments: as ``trainer.train`` takes them, such as ``resume_from_checkpoint=True``.
        budget: what the process may use of the device, such as ``"8GiB"``: planned for, and enforced. ``None``: what
            there is, and nothing but the smaller pieces.
        units: what the loss averages over where the trainer does not divide by ``num_items_in_batch``; by default
            guessed from the labels (see `plimsoll.workload.count_units`).
        batch: with a budget, the largest batch there will be, as the collator makes it; by default the first one.
        on_oom: called with each event as it is recovered from.
        train_options: as ``train_arguments``.

    Returns:
        what ``trainer.train`` returns.

    Raises:
        OutOfMemoryError: if not even a single sample fits; the step is undone.
        BudgetError: if no plan fits the budget; it says which would do.
        InputError: if the trainer is of a kind that is not covered.
    """
    with protected(trainer, budget=budget, units=units, batch=batch, on_oom=on_oom):
        return trainer.train(*train_arguments, **train_options)


@contextmanager
def protected(
    trainer: transformers.Trainer,
    *,
    budget: str | int | None = None,
    units: Units | None = None,
    batch: Any = None,
    on_oom: Callable[[OomEvent], None] | None = None,
) -> Iterator[Protection]:
    """Protect a trainer while the block runs, for what calls ``trainer.train`` itself; arguments are those of `fit`."""
    _refuse(trainer)
    with ExitStack() as stack:
        guard = _Guard(trainer, units, on_oom)
        if budget is not None:
            guard.use_plan(_planned(trainer, budget, units, batch))
            stack.enter_context(guard.backend.limited(parse_bytes(budget)))
        stack.enter_context(guard.at_work())
        yield guard.protection


def _refuse(trainer: transformers.Trainer) -> None:
    missing = [name for name in _NEEDED if not callable(getattr(trainer, name, None))]
    if missing:
        raise InputError(
            f"a {type(trainer).__name__} has no {', '.join(missing)}, which the adapter wraps: use transformers 5.23, "
            "or plimsoll.TrainStep in a loop of your own"
        )
    arguments = trainer.args
    if arguments.n_gpu > 1:
        raise InputError(
            f"this trainer would use DataParallel on {arguments.n_gpu} GPUs: one process copies the model to all of "
            "them in every step and gathers outputs and gradients on the first, which runs out while the others are "
            "empty; set CUDA_VISIBLE_DEVICES=0, or train with one process per GPU (`plimsoll train --nproc`)"
        )
    if arguments.world_size > 1:
        raise InputError(
            f"this trainer is one of {arguments.world_size} processes, which wait for each other inside backward, so "
            "that one cannot do a step again alone: train with one process, or use `plimsoll train --nproc`"
        )
    if arguments.deepspeed is not None:
        raise InputError(
            f"this trainer hands its steps to DeepSpeed ({arguments.deepspeed!r}), which cannot undo one: leave "
            "deepspeed out"
        )


def _planned(trainer: transformers.Trainer, budget: str | int, units: Units | None, batch: Any) -> Plan:
    """Find the fastest mix that fits, of the techniques that leave loop and optimizer to the trainer."""
    backend = backend_for(str(trainer.args.device))
    random_state = backend.random_state()
    sample = next(iter(trainer.get_train_dataloader())) if batch is None else batch
    backend.restore_random_state(random_state)
    model = trainer.model
    assert model is not None
    optimizer = trainer.optimizer or trainer.create_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    return planned(
        model,
        optimizer,
        {name: value for name, value in sample.items() if isinstance(value, Tensor)},
        model_loss,
        budget=budget,
        units=units or units_of(sample, model),
        device=trainer.args.device,
        offered=_OFFERED,
        clip_norm=trainer.args.max_grad_norm or None,
        precision=_precision_of(trainer),
    )


def _precision_of(trainer: transformers.Trainer) -> Precision:
    return "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"


class _Guard:
    """The wrapped calls of one trainer."""

    def __init__(
        self, trainer: transformers.Trainer, units: Units | None, on_oom: Callable[[OomEvent], None] | None
    ) -> None:
        assert trainer.model is not None
        self.trainer = trainer
        self.backend = backend_for(str(trainer.args.device))
        self.position = Position(step=trainer.state.global_step)
        self.protection = Protection()
        self._model: nn.Module = trainer.model
        self._units, self._on_oom = units, on_oom
        self._whole = WholeBatch(self._model, recut_batch_norm=False)
        self._undo = Undo(self._model, self.backend)
        self._window: list[tuple[Any, Any]] = []
        self._ladders: dict[str, Ladder] = {}
        self._rungs: Rungs | None = None
        self._workload: Workload | None = None
        self._share = 1.0
        self._divides: bool | None = None
        self._items: Any = None

    def use_plan(self, plan: Plan) -> None:
        """Have the techniques of a plan and of its fallbacks at work in training."""
        optimizer = self.trainer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        loss = type(self.trainer).compute_loss
        self._workload = Workload(
            self._model,
            optimizer,
            lambda model, inputs: only_loss(loss(self.trainer, model, inputs, num_items_in_batch=self._items)),
            units=self._units or "samples",
            precision=_precision_of(self.trainer),
            device=self.trainer.args.device,
        )
        self._rungs = Rungs(self._workload, plan.choices_by_rung)
        self.protection.plan = plan

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Have the trainer's calls wrapped, and undo that."""
        trainer = self.trainer
        wrapped = {
            "training_step": self._wrapped_step(trainer.training_step),
            "compute_loss": self._wrapped_loss(trainer.compute_loss),
            "prediction_step": self._wrapped_prediction(trainer.prediction_step),
            "create_optimizer": self._wrapped_create(trainer.create_optimizer),
            "log": self._wrapped_log(trainer.log),
        }
        before = {name: vars(trainer).get(name) for name in wrapped}
        self._optimizers: list[torch.optim.Optimizer] = []
        if isinstance(trainer.optimizer, torch.optim.Optimizer):
            self._protect(trainer.optimizer)
        vars(trainer).update(wrapped)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    vars(trainer).pop(name, None)
                else:
                    vars(trainer)[name] = value
            for optimizer in self._optimizers:
                vars(optimizer).pop("step", None)
            if self._rungs is not None:
                self._rungs.close()

    # -- training ------------------------------------------------------------------------------------------------------

    def _wrapped_step(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if not self._window:
                self._undo.remember()
            self._window.append((inputs, num_items_in_batch))
            self.position.step = self.trainer.state.global_step
            loss = self._surviving(original, model)
            if self.trainer.accelerator.gradient_state.sync_gradients:
                self._window.clear()
            return loss

        return training_step

    def _surviving(self, original: Callable[..., Tensor], model: nn.Module) -> Tensor:
        """The newest batch of the window; where memory runs out, the whole window again in smaller pieces."""
        newest, _ = self._window[-1]
        shape = self._shape_of(newest, model)
        ladder = self._ladder_for("training", shape)
        rung = ladder.choose(shape.elements_per_sample)
        todo = self._window[-1:]
        while True:
            size = min(ladder.sizes[rung].samples, shape.num_samples)
            self.position.micro_batch = self.protection.micro_batch = size
            loss = attempt(lambda: self._done(original, model, todo, ladder.sizes[rung]), self.backend, self.position)  # noqa: B023
            if not isinstance(loss, OomEvent):
                ladder.held(rung, math.ceil(size * shape.elements_per_sample))
                return loss
            self._put_back(model)
            todo = self._window
            rung = self._after(loss, ladder, rung, shape)

    def _done(
        self, original: Callable[..., Tensor], model: nn.Module, todo: list[tuple[Any, Any]], size: Size
    ) -> Tensor:
        """Do batches in pieces of a size; returns the loss of the last one."""
        if self._rungs is not None and not self._rungs.is_in_force(size.level):
            self._rungs.use(size.level)
        for inputs, items in todo:
            self._items = items
            self.position.phase = "forward"
            loss = self._in_pieces(original, model, inputs, items, size.samples)
        return loss

    def _in_pieces(
        self, original: Callable[..., Tensor], model: nn.Module, inputs: Any, items: Any, micro_batch: int
    ) -> Tensor:
        if micro_batch >= batch_size_of(inputs):
            return original(model, inputs, items)
        self._refuse_recut(micro_batch, batch_size_of(inputs))
        pieces = split_batch(inputs, micro_batch)
        units = self._units or units_of(inputs, model)
        counts = [count_units(piece, units) for piece in pieces]
        is_divided = self._is_divided_by_items(model, pieces[-1], items)
        total: Tensor | None = None
        try:
            for piece, count in zip(pieces, counts, strict=True):
                if not count:
                    continue  # it has no mean loss
                self._share = 1.0 if is_divided else count / sum(counts)
                loss = original(model, piece, items)
                total = loss if total is None else total + loss
        finally:
            self._share = 1.0
        return original(model, inputs, items) if total is None else total

    def _is_divided_by_items(self, model: nn.Module, piece: Any, items: Any) -> bool:
        """Whether the loss is a sum over what ``num_items_in_batch`` counts: with twice as many items it is half."""
        if items is None:
            return False
        if self._divides is None:
            random_state = self.backend.random_state()
            sample = self.trainer._prepare_inputs(split_batch(piece, 1)[0])
            losses = []
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                for number in (items, items * 2):
                    self.backend.restore_random_state(random_state)
                    loss = self.trainer.compute_loss(model, dict(sample), num_items_in_batch=number)
                    losses.append(float(only_loss(loss)))
            self.backend.restore_random_state(random_state)
            self._divides = math.isclose(losses[0], 2 * losses[1], rel_tol=1e-2)
        return self._divides

    def _wrapped_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(model: nn.Module, inputs: Any, *arguments: Any, **options: Any) -> Any:
            is_plain = not arguments and not options.get("return_outputs") and model.training
            if is_plain and self._workload is not None:
                self._items = options.get("num_items_in_batch")
                loss: Any = self._workload.loss(model, inputs)
            else:
                loss = original(model, inputs, *arguments, **options)
            if not isinstance(loss, Tensor):
                return loss  # with its outputs, in an evaluation
            self.position.phase = "backward"
            return loss if self._share == 1.0 else loss * self._share

        return compute_loss

    def _put_back(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        self._undo.restore()
        self.backend.release()

    # -- the update ----------------------------------------------------------------------------------------------------

    def _wrapped_create(self, original: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        def create_optimizer(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
            optimizer = original(*arguments, **options)
            self._protect(optimizer)
            return optimizer

        return create_optimizer

    def _protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.step`` a transaction; schedules and scalers may wrap it again."""
        if any(optimizer is one for one in self._optimizers):
            return
        self._optimizers.append(optimizer)
        commit = StepCommit(optimizer, self.backend, self.position)
        original = optimizer.step

        def step(closure: Any = None) -> Any:
            if closure is not None:
                return original(closure)
            if is_inside[0]:
                return original()
            is_inside[0] = True
            try:
                self._update(commit)
            finally:
                is_inside[0] = False
            return None

        is_inside = [False]
        optimizer.step = step  # type: ignore[method-assign]

    def _update(self, commit: StepCommit) -> None:
        self.position.phase = "optimizer"
        for tries_left in reversed(range(_UPDATE_TRIES)):
            commit.recovered = []
            commit.step()
            for event in commit.recovered:
                self._note(event)
            if commit.outcome is None:
                return
            event = commit.outcome
            self.backend.release(last_resort=True)
            self._note(event.model_copy(update={"action": "the update once more", "survived": bool(tries_left)}))
        raise OutOfMemoryError(no_way_out(event, 1, Shape(1, 1, 0.0), whole=None))

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _wrapped_prediction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prediction_step(
            model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
        ) -> Any:
            shape = self._shape_of(inputs, model)
            ladder = self._ladder_for("evaluation", shape)
            rung = ladder.choose(shape.elements_per_sample)
            phase, self.position.phase = self.position.phase, "evaluation"
            while True:
                size = min(ladder.sizes[rung].samples, shape.num_samples)
                pieces = [inputs] if size >= shape.num_samples else split_batch(inputs, size)
                found = attempt(
                    lambda: [original(model, piece, prediction_loss_only, ignore_keys) for piece in pieces],  # noqa: B023
                    self.backend,
                    self.position,
                )
                if not isinstance(found, OomEvent):
                    ladder.held(rung, math.ceil(size * shape.elements_per_sample))
                    self.position.phase = phase
                    return joined(found, self._weights(model, pieces)) if len(pieces) > 1 else found[0]
                self.backend.release()
                rung = self._after(found, ladder, rung, shape)

        return prediction_step

    def _weights(self, model: nn.Module, pieces: list[Any]) -> list[int]:
        """What the loss of each piece was divided by."""
        items = [self.trainer._get_num_items_in_batch([piece], self.trainer.args.device) for piece in pieces]
        if items[0] is not None and self._is_divided_by_items(model, pieces[0], items[0]):
            return [int(number or 0) for number in items]
        units = self._units or units_of(pieces[0], model)
        return [count_units(piece, units) for piece in pieces]

    # -- common --------------------------------------------------------------------------------------------------------

    def _shape_of(self, inputs: Any, model: nn.Module) -> Shape:
        num_samples = batch_size_of(inputs)
        return Shape(num_samples, num_samples, count_elements(inputs) / num_samples)

    def _ladder_for(self, what: str, shape: Shape) -> Ladder:
        if self._rungs is not None and what == "training":
            return self._ladders.setdefault(what, Ladder(self._rungs.sizes))
        ladder = self._ladders.get(what)
        if ladder is None or ladder.sizes[0].samples < shape.num_samples:
            self._ladders[what] = ladder = Ladder(micro_batch_sizes(shape.num_samples))
        return ladder

    def _after(self, event: OomEvent, ladder: Ladder, rung: int, shape: Shape) -> int:
        """The rung to go on with, noted with the event."""
        rungs = None if event.phase == "evaluation" else self._rungs  # an evaluation has a ladder of its own
        event, following = after_oom(event, rung, shape, ladder, rungs, self.backend)
        self._note(event)
        if following is None:
            samples = min(ladder.sizes[rung].samples, shape.num_samples)
            raise OutOfMemoryError(no_way_out(event, samples, shape, whole=None))
        return following

    def _refuse_recut(self, micro_batch: int, num_samples: int) -> None:
        reason = self._whole.reason()
        if reason is not None:
            raise InputError(
                f"pieces of {micro_batch} would cut a batch of {num_samples} samples, but {reason.why}: {reason.remedy}"
            )

    def _note(self, event: OomEvent) -> None:
        self.protection.events.append(event)
        if self._on_oom is not None:
            self._on_oom(event)

    def _wrapped_log(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(logs: dict[str, float], *arguments: Any, **options: Any) -> None:
            if "loss" in logs:
                use = self.backend.use()
                logs = logs | {
                    "plimsoll/peak_bytes": use.peak_bytes or use.used_bytes,
                    "plimsoll/micro_batch": self.protection.micro_batch or 0,
                    "plimsoll/oom": len(self.protection.events),
                }
            original(logs, *arguments, **options)

        return log


__all__ = ["Protection", "fit", "protected", "to_training_arguments"]
