"""An injected failure in a training of `storm.py`, survived or not, compared with the same training without it."""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll
from _storm_state import State, differences, state_of
from plimsoll.errors import AfterUpdateError, InputError, PlimsollError, PlimsollWarning, TornStepError

ABSURD_BYTES = 1 << 60
NAMES_STATE = re.compile(r"(is not|cannot be) put back")
_OF_THE_LOOP = ("schedule of the loop", "saved")
NUM_SAMPLES = 4
NUM_UPDATES = 4
"""The maximum number of updates in a trial."""


class Turn(NamedTuple):
    """One of the updates that a loop performs in turn."""

    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]


@dataclass
class Training:
    """The parts of a training.

    Attributes:
        model: all trained modules.
        optimizer: updates the model from the gradients of the loss.
        loss: the loss function in the form that `plimsoll.TrainStep` takes.
        batches: one for each turn, or all batches of a window.
        options: further options of the step.
        kept: state that the training changes in addition to the model, the optimizer and the batches.
        between: called before each batch with its number from 0; no step undoes its changes.
        others: the updates after the first one, in a loop with several updates.
        window: batches per update of a `plimsoll.accelerate` step; 0 for a `TrainStep`.
        steps: the updates in which allocations fail, from 1.
        prepared: the objects prepared by Accelerate, with windows.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    between: Callable[[int], object] = lambda number: None
    others: Sequence[Turn] = ()
    window: int = 0
    steps: tuple[int, int] = (1, 3)
    prepared: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.batches = self.batches or [drawn_batch(seed) for seed in range(NUM_UPDATES)]

    def state(self) -> State:
        schedule = self.options.get("schedule")
        trained = {"model": self.model, "optimizer": self.optimizer, "batches": self.batches, "schedule": schedule}
        optimizers = {f"optimizer {number}": other.optimizer for number, other in enumerate(self.others, 2)}
        return state_of({**trained, **optimizers, **self.kept})

    def in_windows(self, window: int) -> Training:
        """Return the same training with ``window`` batches per update."""
        batches = [drawn_batch(seed) for seed in range(NUM_UPDATES * window)]
        return replace(self, window=window, batches=batches) if window else self

    def turn(self, number: int) -> Turn:
        """Return the turn of an update, from 1."""
        turns = [Turn(self.optimizer, self.loss), *self.others]
        return turns[(number - 1) % len(turns)]

    def batches_of(self, number: int) -> Iterator[Any]:
        """Yield the batches of an update, from 1; ``between`` is called before each one."""
        size = self.window or 1
        for place in range((number - 1) * size, number * size):
            self.between(place)
            yield self.batches[place]


class Kind(NamedTuple):
    """One kind of training, with a function that builds identical copies."""

    group: str
    name: str
    make: Callable[[], Training]

    def made(self) -> Training:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        training = self.make()
        if training.window:
            from accelerate import Accelerator  # the import takes seconds

            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=training.window)
            training.prepared = accelerator, *accelerator.prepare(training.model, training.optimizer)
        return training


def drawn_batch(seed: int) -> dict[str, Tensor]:
    """Return four texts of six words, each in one of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(50, (NUM_SAMPLES, 6), generator=generator),
        "y": torch.randint(3, (NUM_SAMPLES,), generator=generator),
    }


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes allocations fail with the allocator's own error: operators that create tensors, counted from 1.

    The counter is unreachable from the training's state, so that an undo cannot reset it.
    """

    def __init__(self, fails: Callable[[int], bool], phase: Callable[[], str] = str) -> None:
        super().__init__()
        self.num_allocations, self.failed = 0, []
        self._fails, self._phase = fails, phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if allocates(func) and not _is_empty(func, args):
            self.num_allocations += 1
            if self._fails(self.num_allocations):
                self.failed.append(f"{self._phase()}, {func.name()} in {_line_of_ours()}")
                torch.empty(ABSURD_BYTES, dtype=torch.uint8)
        return func(*args, **kwargs or {})


@cache
def allocates(func: Any) -> bool:
    """Return whether an operator returns a tensor that is neither a view nor an argument."""
    returns = func._schema.returns
    return any(one.alias_info is None and "Tensor" in str(one.type) for one in returns)


def _is_empty(func: Any, args: Any) -> bool:
    """Return whether an operator makes an empty tensor, which cannot run out of memory."""
    return func is torch.ops.aten.empty.memory_format and 0 in args[0]


def _line_of_ours() -> str:
    """Return the running line of Plimsoll, for debugging."""
    frame = sys._getframe(1)
    while frame is not None:
        if "plimsoll" in frame.f_globals.get("__name__", ""):
            return f"{frame.f_globals['__name__'].removeprefix('plimsoll.')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


NEVER, CUT, ONCE, TWICE, FROM_THERE_ON = "never", "never, and cut", "once", "twice", "from there on"


class Plan(NamedTuple):
    """The allocations of a step that fail: none, one, one and the next, or all from one on.

    If none fails, the batches may still be split from the start.
    """

    step: int
    allocation: int = 0
    how: str = ONCE

    def fails(self, number: int) -> bool:
        if self.how == FROM_THERE_ON:
            return number >= self.allocation
        return number == self.allocation or (self.how == TWICE and number == self.allocation + 1)


EQUAL, DIFFERENT, RAW, NAMED, UNCHANGED, CHANGED, NO_SUCH = (
    "equal", "different", "raw error", "refused by name", "out of memory, unchanged", "out of memory, changed", ""
)  # fmt: skip
OUTCOMES = (EQUAL, DIFFERENT, RAW, NAMED, UNCHANGED, CHANGED)


class Trial(NamedTuple):
    """The outcome of a failure: one of `OUTCOMES`, or `NO_SUCH` if the step has no such allocation."""

    outcome: str
    said: str = ""
    where: str = ""


class Cut(NamedTuple):
    """The split of an update's batches: samples per pass for each batch, and the fallback."""

    samples: tuple[int, ...]
    fallback: int = 0


class Updates(Protocol):
    """Performs the updates of a training in order."""

    @property
    def phase(self) -> str:
        """The phase of the current update."""

    def do(self, number: int, batches: Iterator[Any], failing: Failing) -> tuple[Cut, float | None]:
        """Perform an update, from 1; return the split of its batches and the loss of the last one."""

    def cut(self, number: int) -> Cut:
        """Return the split of the batches of an update that ended in an error."""

    def close(self) -> None:
        """Uninstall the techniques."""


class Steps:
    """A `plimsoll.TrainStep` for each turn."""

    def __init__(self, training: Training) -> None:
        alike = {name: one for name, one in training.options.items() if name != "schedule"}
        others = [train_step(training.model, *turn, alike) for turn in training.others]
        first = train_step(training.model, training.optimizer, training.loss, training.options)
        self._steps = [first, *others]
        self._in_hand = first

    @property
    def phase(self) -> str:
        return self._in_hand.position.phase

    def do(self, number: int, batches: Iterator[Any], failing: Failing) -> tuple[Cut, float | None]:
        self._in_hand = self._steps[(number - 1) % len(self._steps)]
        with failing:
            result = self._in_hand(next(batches))
        return Cut((result.micro_batch,), result.fallback), result.loss

    def cut(self, number: int) -> Cut:
        return Cut((self._in_hand.position.micro_batch or NUM_SAMPLES,), self._in_hand.fallback)

    def begin_at(self, fallback: int) -> None:
        """Set the fallback of the next steps."""
        self._in_hand.begin_again_at(fallback)

    def close(self) -> None:
        for step in self._steps:
            step.close()


class Windows:
    """A `plimsoll.accelerate` step with several batches per update."""

    def __init__(self, training: Training) -> None:
        options = {"units": "samples", **training.options}
        self._step = plimsoll.accelerate.step(*training.prepared, training.loss, **options)
        self._samples: list[int] = []

    @property
    def phase(self) -> str:
        return self._step.transaction.position.phase

    def do(self, number: int, batches: Iterator[Any], failing: Failing) -> tuple[Cut, float | None]:
        self._samples, loss = [], None
        for batch in batches:
            with failing:
                result = self._step(batch)
            is_again = self._step.transaction.is_again
            done = len(self._samples)
            self._samples = [*([result.micro_batch] * done if is_again else self._samples), result.micro_batch]
            loss = result.loss.item()
        return self.cut(number), loss

    def cut(self, number: int) -> Cut:
        return Cut(tuple(self._samples))

    def close(self) -> None:
        self._step.close()


class Run:
    """A training in progress, with its history."""

    def __init__(self, kind: Kind, is_cut: bool = False) -> None:
        self.kind, self.training = kind, kind.made()
        if is_cut:
            self.training.options["micro_batch"] = NUM_SAMPLES // 2
        self.updates: Updates = Windows(self.training) if self.training.window else Steps(self.training)
        self.cuts: list[Cut] = []
        self.losses: list[float | None] = []
        self.num_allocations: list[int] = []
        self.failed: list[str] = []
        self._number, self._first, self._others = 0, None, iter(())

    def begin(self, number: int) -> None:
        """Get the first batch of an update, from 1; the loop's changes before it are applied once."""
        if self._number != number:
            self._number, self._others = number, self.training.batches_of(number)
            self._first = next(self._others)

    def do(self, number: int, fails: Callable[[int], bool] = lambda _: False) -> None:
        """Perform an update, from 1."""
        self.begin(number)
        failing = Failing(fails, lambda: self.updates.phase)
        self.failed = failing.failed
        cut, loss = self.updates.do(number, self._batches(), failing)
        self.num_allocations.append(failing.num_allocations)
        self.cuts.append(cut)
        self.losses.append(loss)

    def _batches(self) -> Iterator[Any]:
        yield self._first
        yield from self._others

    def follow(self, number: int) -> None:
        """Follow the remedy of an `AfterUpdateError`: step the schedule; the update itself has happened."""
        self.training.options["schedule"].step()
        self.cuts.append(self.updates.cut(number))
        self.losses.append(None)

    def unlike_before(self, before: State) -> list[str]:
        """Return the names of state that an undone update changed, except for the loop's own state."""
        return [name for name in differences(before, self.training.state()) if not name.startswith(_OF_THE_LOOP)]

    def differing(self, references: dict[Any, State]) -> list[str]:
        """Return the names of state that differs, at the end, from the same training without failures."""
        self.updates.close()
        reference = dict(_reference(self.kind, self.cuts, references))
        losses = [loss for loss, own in zip(reference.pop("losses"), self.losses, strict=True) if own is not None]
        own = [loss for loss in self.losses if loss is not None]
        return differences({**reference, "losses": losses}, {**self.training.state(), "losses": own})


def tried(kind: Kind, plan: Plan, references: dict[Any, State]) -> Trial:
    """Train up to a step, let it fail, train one more step, and compare."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", PlimsollWarning)
        trial = _tried(Run(kind, is_cut=plan.how == CUT), plan, references)
    named = [str(one.message) for one in warned if NAMES_STATE.search(str(one.message))]
    if trial.outcome in {DIFFERENT, CHANGED} and named:
        return trial._replace(outcome=NAMED, said=f"{trial.said}, as warned: {named[0]}")
    return trial


def _tried(run: Run, plan: Plan, references: dict[Any, State]) -> Trial:
    try:
        for number in range(1, plan.step):
            run.do(number)
    except InputError:  # the batch must not be split
        return Trial(NO_SUCH)
    except Exception as raised:  # noqa: BLE001
        return Trial(RAW, f"without a failure {_said(raised)}")
    run.begin(plan.step)
    is_failing = plan.how not in (NEVER, CUT)
    before, error = run.training.state(), None
    try:
        run.do(plan.step, plan.fails)
    except BaseException as raised:  # noqa: BLE001 - what it is, is what is to be found out
        error = raised.with_traceback(None)
    if not run.failed and (error is not None or is_failing):
        return Trial(NO_SUCH) if error is None else Trial(RAW, f"without a failure {_said(error)}")
    where = " ... ".join(dict.fromkeys([*run.failed[:1], *run.failed[-1:]]))
    if error is not None and (outcome := _outcome_of(error)) is not None:
        return Trial(outcome, _said(error), where)
    is_done = error is None or isinstance(error, AfterUpdateError)
    if not is_done and (changed := run.unlike_before(before)):
        return Trial(CHANGED, f"{_some(changed)} after {_said(error)}", where)
    if not is_done and run.training.window:  # a loop would repeat the window with the changes between its batches
        return Trial(UNCHANGED, _said(error), where)
    try:
        if error is not None and is_done:
            run.follow(plan.step)
        for number in range(plan.step + is_done, min(plan.step + 1, NUM_UPDATES) + 1):
            run.do(number)
        found = run.differing(references)
    except Exception as later:  # noqa: BLE001
        return Trial(RAW if error is None else CHANGED, f"afterwards {_said(later)}", where)
    if error is None:
        return Trial(DIFFERENT, f"{_some(found)} with cuts {run.cuts}", where) if found else Trial(EQUAL, "", where)
    outcome = CHANGED if found else NAMED if is_done else UNCHANGED
    return Trial(outcome, f"{_some(found)} after {_said(error)}", where)


def _outcome_of(error: BaseException) -> str | None:
    """Return the outcome that an error means, or None if the state must be compared."""
    if not isinstance(error, PlimsollError):
        return RAW
    if isinstance(error, TornStepError) and not isinstance(error, AfterUpdateError):
        return CHANGED
    return NAMED if NAMES_STATE.search(str(error)) else None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def num_allocations(kind: Kind) -> dict[int, int]:
    """Count the allocations, without failures, of each update in which they are to fail."""
    run = Run(kind)
    steps = run.training.steps
    for number in range(1, max(steps) + 1):
        run.do(number)
    return {step: run.num_allocations[step - 1] for step in steps}


def train_step(model: nn.Module, optimizer: Any, loss: Any, options: dict[str, Any]) -> plimsoll.TrainStep:
    return plimsoll.TrainStep(model, optimizer, loss, **{"units": "samples", **options})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- the same training in which nothing fails --------------------------------------------------------------------------


def _reference(kind: Kind, cuts: Sequence[Cut], references: dict[Any, State]) -> State:
    key = kind.name, tuple(cuts)
    if key not in references:
        training = kind.made()
        losses = forced(training, cuts) if "fallbacks" in training.options else plain(training, cuts)
        references[key] = {**training.state(), "losses": losses}
    return references[key]


def plain(training: Training, cuts: Sequence[Cut]) -> list[float]:
    """Run the equivalent plain PyTorch loop with the same splits, and return the loss of each update's last batch."""
    losses = []
    for number, (samples, _) in enumerate(cuts, 1):
        optimizer, loss_function = training.turn(number)
        for place, (batch, micro_batch) in enumerate(zip(training.batches_of(number), samples, strict=True)):
            if place == 0:
                training.model.zero_grad(), optimizer.zero_grad()
            loss = _plain_batch(training, loss_function, batch, micro_batch)
        if "clip_norm" in training.options:
            nn.utils.clip_grad_norm_(training.model.parameters(), training.options["clip_norm"])
        optimizer.step()
        if "schedule" in training.options:
            training.options["schedule"].step()
        losses.append(loss)
    return losses


def _plain_batch(training: Training, loss_function: Any, batch: Any, micro_batch: int) -> float:
    """Add the gradients of a batch, and return its loss."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.options.get("precision", "fp32"))
    total, is_whole = torch.zeros(()), micro_batch >= NUM_SAMPLES
    for start in range(0, NUM_SAMPLES, micro_batch):
        samples = batch if is_whole else {name: one[start : start + micro_batch] for name, one in batch.items()}
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = loss_function(training.model, samples)
        if not is_whole:
            loss = loss * (min(micro_batch, NUM_SAMPLES - start) / NUM_SAMPLES)
        (loss / training.window if training.window else loss).backward()
        total = total + loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
    return total.item()


def forced(training: Training, cuts: Sequence[Cut]) -> list[float | None]:
    """Return the losses of a `TrainStep` with techniques, whose fallback is given for each step."""
    steps, losses, never = Steps(training), [], Failing(lambda _: False)
    for number, cut in enumerate(cuts, 1):
        if number == 1 or cuts[number - 2] != cut:
            steps.begin_at(cut.fallback)
        losses.append(steps.do(number, training.batches_of(number), never)[1])
    steps.close()
    return losses
