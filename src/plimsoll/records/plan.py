"""What a run will do to stay under its budget, and what it will do next if memory still runs out."""

from __future__ import annotations

from typing import ClassVar

from plimsoll.records.base import Frozen, Record
from plimsoll.records.device import Budget


class Choice(Frozen):
    """One technique with its options, e.g. ``micro_batch`` with ``{"samples": 16}``."""

    technique: str
    options: dict[str, int | float | str | bool] = {}


class Plan(Record):
    """The choices in force and the smaller plans to take, in order, when memory runs out."""

    record_kind: ClassVar[str] = "plan"

    budget: Budget
    choices: tuple[Choice, ...]
    fallbacks: tuple[tuple[Choice, ...], ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The micro-batch (samples) of the plan and of each fallback, largest first."""
        ladder = (self.choices, *self.fallbacks)
        choices = (choice for rung in ladder for choice in rung)
        return tuple(int(choice.options["samples"]) for choice in choices if choice.technique == "micro_batch")


def micro_batch_plan(budget: Budget, sizes: tuple[int, ...]) -> Plan:
    """Make the plan whose choices are the micro-batch ``sizes`` (samples), largest first."""
    rungs = tuple((Choice(technique="micro_batch", options={"samples": size}),) for size in sizes)
    return Plan(budget=budget, choices=rungs[0], fallbacks=rungs[1:])
