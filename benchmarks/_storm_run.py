"""One failure of a training for `storm.py`: made, survived or not, and compared with the same training without it."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll
from _storm_state import State, differences, state_of
from plimsoll.errors import OutOfMemoryError, PlimsollError, TornStepError

ABSURD_BYTES = 1 << 60
NUM_SAMPLES = 4


@dataclass
class Training:
    """What a kind of training is made of; ``kept`` is what it changes besides the model, the optimizer, the batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batches = self.batches or [drawn_batch(seed) for seed in range(5)]

    def state(self) -> State:
        schedule = self.options.get("schedule")
        trained = {"model": self.model, "optimizer": self.optimizer, "batches": self.batches, "schedule": schedule}
        return state_of({**trained, **self.kept})


class Kind(NamedTuple):
    """One kind of training: how to make it anew, the same each time."""

    group: str
    name: str
    make: Callable[[], Training]

    def made(self) -> Training:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        return self.make()


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


HOW = ("once", "twice", "from there on")


class Plan(NamedTuple):
    """Which allocations of which step fail: one, this one and the next, or all from there on (see `HOW`)."""

    step: int
    allocation: int
    how: str = "once"

    def fails(self, number: int) -> bool:
        if self.how == "from there on":
            return number >= self.allocation
        return number == self.allocation or (self.how == "twice" and number == self.allocation + 1)


class Trial(NamedTuple):
    """What came of a failure: `kind` is one of `OUTCOMES`, or empty where the step has no such allocation."""

    outcome: str
    said: str = ""
    where: str = ""


EQUAL, DIFFERENT, RAW, REFUSED, UNCHANGED, CHANGED, NO_SUCH = (
    "equal", "different", "raw error", "refused", "out of memory, unchanged", "out of memory, changed", ""
)  # fmt: skip
OUTCOMES = (EQUAL, DIFFERENT, RAW, REFUSED, UNCHANGED, CHANGED)


def tried(kind: Kind, plan: Plan, references: dict[Any, State]) -> Trial:
    """Train up to a step, let it fail, go on for one more, and compare."""
    training = kind.made()
    step = step_of(training)
    cuts: list[tuple[int, int]] = []
    losses: list[float] = []
    for batch in training.batches[: plan.step - 1]:
        _note(step(batch), cuts, losses)
    before = training.state()
    batch = training.batches[plan.step - 1]
    failing, error = Failing(plan.fails, lambda: step.position.phase), None
    with failing:
        try:
            result = step(batch)
        except BaseException as raised:  # noqa: BLE001 - what it is, is what is to be found out
            error = raised.with_traceback(None)
    if not failing.failed:
        return Trial(NO_SUCH)
    where = " ... ".join(dict.fromkeys([failing.failed[0], failing.failed[-1]]))
    if isinstance(error, TornStepError) or (error is not None and not isinstance(error, PlimsollError)):
        outcome = CHANGED if isinstance(error, TornStepError) else RAW
        return Trial(outcome, f"{type(error).__name__}: {str(error)[:200]}", where)
    if error is not None and (changed := differences(before, training.state())):
        return Trial(CHANGED, f"{_some(changed)} after {type(error).__name__}: {error}", where)
    try:
        _note(step(batch) if error is not None else result, cuts, losses)
        _note(step(training.batches[plan.step]), cuts, losses)
        step.close()
    except Exception as later:  # noqa: BLE001
        said = f"afterwards {type(later).__name__}: {str(later)[:200]}"
        return Trial(RAW if error is None else CHANGED, said, where)
    found = differences(_reference(kind, cuts, references), {**training.state(), "losses": losses})
    if error is not None:
        is_oom = isinstance(error, OutOfMemoryError)
        outcome = CHANGED if found else UNCHANGED if is_oom else REFUSED
        return Trial(outcome, f"{_some(found)} after {type(error).__name__}: {error}", where)
    return Trial(DIFFERENT, f"{_some(found)} with cuts {cuts}", where) if found else Trial(EQUAL, "", where)


def num_allocations(kind: Kind, steps: Sequence[int]) -> list[int]:
    """How many allocations these steps make where nothing fails."""
    training, numbers = kind.made(), []
    step = step_of(training)
    for batch in training.batches[: max(steps)]:
        with Failing(lambda _: False) as counting:
            step(batch)
        numbers.append(counting.num_allocations)
    step.close()
    return [numbers[step - 1] for step in steps]


def step_of(training: Training) -> plimsoll.TrainStep:
    options = {"units": "samples", **training.options}
    return plimsoll.TrainStep(training.model, training.optimizer, training.loss, **options)


def _note(result: plimsoll.StepResult, cuts: list[tuple[int, int]], losses: list[float]) -> None:
    cuts.append((result.micro_batch, result.rung))
    losses.append(result.loss)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- the same training in which nothing fails --------------------------------------------------------------------------


def _reference(kind: Kind, cuts: list[tuple[int, int]], references: dict[Any, State]) -> State:
    key = kind.name, tuple(cuts)
    if key not in references:
        training = kind.made()
        losses = forced(training, cuts) if "rungs" in training.options else plain(training, cuts)
        references[key] = {**training.state(), "losses": losses}
    return references[key]


def plain(training: Training, cuts: Sequence[tuple[int, int]]) -> list[float]:
    """The loop that plain PyTorch would be, with the batches cut so; returns the losses."""
    options, optimizer, losses = training.options, training.optimizer, []
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.get("precision", "fp32"))
    for batch, (micro_batch, _) in zip(training.batches, cuts, strict=False):
        training.model.zero_grad(), optimizer.zero_grad()
        total = torch.zeros(())
        for start in range(0, NUM_SAMPLES, micro_batch):
            is_whole = micro_batch >= NUM_SAMPLES
            piece = batch if is_whole else {name: one[start : start + micro_batch] for name, one in batch.items()}
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = training.loss(training.model, piece)
            if not is_whole:
                loss = loss * (min(micro_batch, NUM_SAMPLES - start) / NUM_SAMPLES)
            loss.backward()
            total = total + loss.detach().float()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(training.model.parameters(), options["clip_norm"])
        optimizer.step()
        if "schedule" in options:
            options["schedule"].step()
        losses.append(total.item())
    return losses


def forced(training: Training, cuts: Sequence[tuple[int, int]]) -> list[float]:
    """A `TrainStep` that is told the rung of each step, for what no plain loop has: techniques; returns the losses."""
    step, losses = step_of(training), []
    for number, (batch, (_, rung)) in enumerate(zip(training.batches, cuts, strict=False)):
        if number == 0 or cuts[number - 1] != cuts[number]:
            step.begin_again_at(rung)
        losses.append(step(batch).loss)
    step.close()
    return losses


def quiet() -> None:
    """Let Plimsoll warn without a line for each of thousands of trainings."""
    warnings.simplefilter("ignore")
