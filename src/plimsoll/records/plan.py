"""What a run will do to stay under its budget, why, and what it will do next if memory still runs out."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.device import Budget
from plimsoll.records.prediction import Estimate, Prediction

Numerics = Literal["bitwise", "reordered", "reduced precision", "lossy"]
"""What a technique does to the numbers: the same bits; the same mathematics rounded in another order; what autocast
does; or another model, or another training."""


class Choice(Frozen):
    """One technique with its options, e.g. ``micro_batch`` with ``{"samples": 16}``."""

    technique: str
    options: dict[str, int | float | str | bool] = {}

    def __str__(self) -> str:
        """As it is written on a command line: ``micro_batch=16``, ``autocast=bf16``, ``offload``."""
        values = list(self.options.values())
        if not values:
            return self.technique
        if len(values) == 1:
            return f"{self.technique}={_word(values[0])}"
        inner = ",".join(f"{name}={_word(value)}" for name, value in self.options.items())
        return f"{self.technique}({inner})"


def _word(value: float | str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Duration(Frozen):
    """Seconds with their range."""

    likely_seconds: float
    low_seconds: float
    high_seconds: float


class Rung(Frozen):
    """One way to run a step: techniques in the order they are installed, and what is predicted of it.

    ``peak`` and ``step_time`` are ``None`` where nothing was predicted: without a plan, and below the smallest rung
    that was.
    """

    choices: tuple[Choice, ...]
    peak: Estimate | None = None
    step_time: Duration | None = None

    @property
    def micro_batch(self) -> int:
        """Samples of one forward and backward pass."""
        return next(int(choice.options["samples"]) for choice in self.choices if choice.technique == "micro_batch")

    @property
    def others(self) -> tuple[Choice, ...]:
        """The choices but for the micro-batch."""
        return tuple(choice for choice in self.choices if choice.technique != "micro_batch")


class Rejected(Frozen):
    """Something that was considered and not taken; ``reason`` is a sentence with numbers."""

    choices: tuple[Choice, ...]
    reason: str
    peak: Estimate | None = None
    step_time: Duration | None = None


class Plan(Record):
    """The way to run that was chosen, and the smaller ones to take, in order, when memory runs out.

    ``rungs`` begins with what is in force; their predicted peaks fall. ``plain`` is the whole batch without any
    technique. ``made_for`` says of what the plan is: a plan is refused where one of these facts differs. Where nothing
    fits, ``rungs`` has what needs least, ``smallest_budget_bytes`` is the budget it would take, and ``openings`` is
    what techniques that change the training would need, if they were allowed.
    """

    record_kind: ClassVar[str] = "plan"
    schema_version: ClassVar[int] = 2

    budget: Budget
    rungs: tuple[Rung, ...]
    limit_bytes: int | None = None
    plain: Rung | None = None
    rejected: tuple[Rejected, ...] = ()
    openings: tuple[Rejected, ...] = ()
    smallest_budget_bytes: int | None = None
    prediction: Prediction | None = None
    pinned: tuple[Choice, ...] = ()
    forbidden: tuple[str, ...] = ()
    made_for: dict[str, str] = {}
    num_traces: int = 0
    plan_seconds: float = 0.0

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What is in force at first."""
        return self.rungs[0].choices

    @property
    def choices_by_rung(self) -> tuple[tuple[Choice, ...], ...]:
        """What the training step takes."""
        return tuple(rung.choices for rung in self.rungs)

    @property
    def fits(self) -> bool:
        """Whether the plan stays under its budget, as far as is known."""
        return self.smallest_budget_bytes is None


def micro_batch_choice(samples: int) -> Choice:
    """Make the choice of a micro-batch."""
    return Choice(technique="micro_batch", options={"samples": samples})


def micro_batch_plan(budget: Budget, sizes: tuple[int, ...]) -> Plan:
    """Make the plan whose rungs are the micro-batches ``sizes`` (samples), largest first, and nothing else."""
    return Plan(budget=budget, rungs=tuple(Rung(choices=(micro_batch_choice(size),)) for size in sizes))
