"""One failure of a training for `storm.py`: made, survived or not, and compared with the same training without it."""

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
"""The most that a trial does."""


class Turn(NamedTuple):
    """One of the updates that a loop does in turn."""

    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]


@dataclass
class Training:
    """What a kind of training is made of.

    Attributes:
        model: all that is trained.
        optimizer: updates it, by the gradients of the loss.
        loss: as `plimsoll.TrainStep` takes it.
        batches: one for each turn, or as many as a window has.
        options: further ones of the step.
        kept: what the training changes besides the model, the optimizer and the batches.
        between: what the loop does before each batch, by its number from 0; no step undoes that.
        others: of a loop with several updates, those that follow the first.
        window: the number of batches of one update, which then is one of `plimsoll.accelerate`; 0 for a `TrainStep`.
        steps: the updates in which allocations fail, from 1.
        prepared: what Accelerate makes of it, where there are windows.
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
        """The same with so many batches an update."""
        batches = [drawn_batch(seed) for seed in range(NUM_UPDATES * window)]
        return replace(self, window=window, batches=batches) if window else self

    def turn(self, number: int) -> Turn:
        """Of an update, from 1."""
        turns = [Turn(self.optimizer, self.loss), *self.others]
        return turns[(number - 1) % len(turns)]

    def batches_of(self, number: int) -> Iterator[Any]:
        """The batches of an update, from 1, each when the loop has done what it does before it."""
        size = self.window or 1
        for place in range((number - 1) * size, number * size):
            self.between(place)
            yield self.batches[place]


class Kind(NamedTuple):
    """One kind of training: how to make it anew, the same each time."""

    group: str
    name: str
    make: Callable[[], Training]

    def made(self) -> Training:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        training = self.make()
        if training.window:
            from accelerate import Accelerator  # takes seconds

            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=training.window)
            training.prepared = accelerator, *accelerator.prepare(training.model, training.optimizer)
        return training


def drawn_batch(seed: int) -> dict[str, Tensor]:
    """Four texts of six words, each of one of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(50, (NUM_SAMPLES, 6), generator=generator),
        "y": torch.randint(3, (NUM_SAMPLES,), generator=generator),
    }


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets allocations fail with the allocator's own error: those operators that make new tensors, counted from 1.

    What it counts is held by nothing that a training can reach, so no undo can count back.
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
    """Whether an operator returns a tensor that is no view or argument of before."""
    returns = func._schema.returns
    return any(one.alias_info is None and "Tensor" in str(one.type) for one in returns)


def _is_empty(func: Any, args: Any) -> bool:
    """No allocator runs out over nothing."""
    return func is torch.ops.aten.empty.memory_format and 0 in args[0]


def _line_of_ours() -> str:
    """The line of Plimsoll that is running, for whoever mends it."""
    frame = sys._getframe(1)
    while frame is not None:
        if "plimsoll" in frame.f_globals.get("__name__", ""):
            return f"{frame.f_globals['__name__'].removeprefix('plimsoll.')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


NEVER, CUT, ONCE, TWICE, FROM_THERE_ON = "never", "never, and cut", "once", "twice", "from there on"


class Plan(NamedTuple):
    """Which allocations of which step fail: none, one, this one and the next, or all from there on.

    Where none does, batches may be cut all the same from the start.
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
    """What came of a failure: one of `OUTCOMES`, or `NO_SUCH` where the step has no such allocation."""

    outcome: str
    said: str = ""
    where: str = ""


class Cut(NamedTuple):
    """How the batches of an update were cut: the samples of a pass, for each batch, and the fallback."""

    samples: tuple[int, ...]
    fallback: int = 0


class Updates(Protocol):
    """What does the updates of a training, one after the other."""

    @property
    def phase(self) -> str:
        """Where the update in hand is."""

    def do(self, number: int, batches: Iterator[Any], failing: Failing) -> tuple[Cut, float | None]:
        """Do an update, from 1; returns how its batches were cut, and the loss of the last."""

    def cut(self, number: int) -> Cut:
        """Say how an update was cut that ended in an error."""

    def close(self) -> None:
        """Take techniques back."""


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
        """Be told what the next steps are to use."""
        self._in_hand.begin_again_at(fallback)

    def close(self) -> None:
        for step in self._steps:
            step.close()


class Windows:
    """A `plimsoll.accelerate` step, several batches an update."""

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
    """A kind of training, and what has been done of it."""

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
        """Come to the first batch of an update, from 1: what the loop does before it is done once."""
        if self._number != number:
            self._number, self._others = number, self.training.batches_of(number)
            self._first = next(self._others)

    def do(self, number: int, fails: Callable[[int], bool] = lambda _: False) -> None:
        """Do an update, from 1."""
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
        """Do what an `AfterUpdateError` asks for: the update is done, and the schedule is not."""
        self.training.options["schedule"].step()
        self.cuts.append(self.updates.cut(number))
        self.losses.append(None)

    def unlike_before(self, before: State) -> list[str]:
        """What is not as before the first batch of an update that was undone, but for what only the loop has."""
        return [name for name in differences(before, self.training.state()) if not name.startswith(_OF_THE_LOOP)]

    def differing(self, references: dict[Any, State]) -> list[str]:
        """What is not as in the same training without failures, at its end."""
        self.updates.close()
        reference = dict(_reference(self.kind, self.cuts, references))
        losses = [loss for loss, own in zip(reference.pop("losses"), self.losses, strict=True) if own is not None]
        own = [loss for loss in self.losses if loss is not None]
        return differences({**reference, "losses": losses}, {**self.training.state(), "losses": own})


def tried(kind: Kind, plan: Plan, references: dict[Any, State]) -> Trial:
    """Train up to a step, let it fail, go on for one more, and compare."""
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
    except InputError:  # it may not be cut
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
    if not is_done and run.training.window:  # a loop would begin the window anew, with what comes between
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
    """What an error comes to whatever the state is; ``None`` where it must be as before."""
    if not isinstance(error, PlimsollError):
        return RAW
    if isinstance(error, TornStepError) and not isinstance(error, AfterUpdateError):
        return CHANGED
    return NAMED if NAMES_STATE.search(str(error)) else None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def num_allocations(kind: Kind) -> dict[int, int]:
    """How many allocations there are in each update in which they are to fail, where nothing fails."""
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
    """The loop that plain PyTorch would be, with the batches cut so; returns the loss of each update's last batch."""
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
    """Return the losses of a `TrainStep` that is told the fallback of each step, with techniques."""
    steps, losses, never = Steps(training), [], Failing(lambda _: False)
    for number, cut in enumerate(cuts, 1):
        if number == 1 or cuts[number - 2] != cut:
            steps.begin_at(cut.fallback)
        losses.append(steps.do(number, training.batches_of(number), never)[1])
    steps.close()
    return losses
