"""One failure of a training for `storm.py`: made, survived or not, and compared with the same training without it."""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll
from _storm_state import State, differences, state_of
from plimsoll import errors
from plimsoll.device.cpu import CpuBackend
from plimsoll.errors import PlimsollError, PlimsollWarning, TornStepError

AfterUpdateError: Any = getattr(errors, "AfterUpdateError", ())
ABSURD_BYTES = 1 << 60
NAMES_STATE = re.compile(r"(is not|cannot be) put back")
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


def in_pieces() -> AbstractContextManager[Any]:
    """Let updates go piece by piece, as on a GPU, so that each of their allocations can fail.

    One that the CPU does at once has allocated all its room beforehand, where no allocator runs out in it.
    """
    return mock.patch.object(CpuBackend, "reserved", return_value=None)


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


NEVER, ONCE, TWICE, FROM_THERE_ON = "never", "once", "twice", "from there on"


class Plan(NamedTuple):
    """Which allocations of which step fail: none, one, this one and the next, or all from there on."""

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


class Run:
    """A kind of training, and what has been done of it."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.training = kind, kind.made()
        self.step = step_of(self.training)
        self.cuts: list[tuple[int, int]] = []
        self.losses: list[float | None] = []
        self.num_allocations: list[int] = []
        self.failed: list[str] = []

    def do(self, number: int, fails: Callable[[int], bool] = lambda _: False) -> None:
        """Do a step, counted from 1."""
        failing = Failing(fails, lambda: self.step.position.phase)
        with failing, in_pieces():
            self.failed = failing.failed
            result = self.step(self.training.batches[number - 1])
        self.num_allocations.append(failing.num_allocations)
        self.cuts.append((result.micro_batch, result.rung))
        self.losses.append(result.loss)

    def differing(self, references: dict[Any, State]) -> list[str]:
        """What is not as in the same training without failures, at its end."""
        self.step.close()
        return differences(
            _reference(self.kind, self.cuts, references), {**self.training.state(), "losses": self.losses}
        )


def tried(kind: Kind, plan: Plan, references: dict[Any, State]) -> Trial:
    """Train up to a step, let it fail, go on for one more, and compare."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", PlimsollWarning)
        trial = _tried(Run(kind), plan, references)
    named = [str(one.message) for one in warned if NAMES_STATE.search(str(one.message))]
    if trial.outcome == DIFFERENT and named:
        return trial._replace(outcome=NAMED, said=f"{trial.said}, as warned: {named[0]}")
    return trial


def _tried(run: Run, plan: Plan, references: dict[Any, State]) -> Trial:
    for number in range(1, plan.step):
        run.do(number)
    before, error = run.training.state(), None
    try:
        run.do(plan.step, plan.fails)
    except BaseException as raised:  # noqa: BLE001 - what it is, is what is to be found out
        error = raised.with_traceback(None)
    if not run.failed and (error is not None or plan.how != NEVER):
        return Trial(NO_SUCH) if error is None else Trial(RAW, f"without a failure {_said(error)}")
    where = " ... ".join(dict.fromkeys([*run.failed[:1], *run.failed[-1:]]))
    if error is not None and (outcome := _outcome_of(error)) is not None:
        return Trial(outcome, _said(error), where)
    is_done = error is None or isinstance(error, AfterUpdateError)
    if not is_done and (changed := differences(before, run.training.state())):
        return Trial(CHANGED, f"{_some(changed)} after {_said(error)}", where)
    try:
        if error is not None and is_done:
            run.follow()
        for number in range(plan.step + is_done, plan.step + 2):
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


def num_allocations(kind: Kind, steps: Sequence[int]) -> list[int]:
    """How many allocations these steps make where nothing fails."""
    run = Run(kind)
    for number in range(1, max(steps) + 1):
        run.do(number)
    return [run.num_allocations[step - 1] for step in steps]


def step_of(training: Training) -> plimsoll.TrainStep:
    options = {"units": "samples", **training.options}
    return plimsoll.TrainStep(training.model, training.optimizer, training.loss, **options)


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
