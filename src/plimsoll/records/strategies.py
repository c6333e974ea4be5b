"""A comparison of fine-tuning strategies under a budget: memory, time, and the effect on the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.plan import Choice, Duration
from plimsoll.records.prediction import Estimate


class Strategy(Frozen):
    """A fine-tuning strategy with the fastest plan that was found for it.

    ``changes`` describes its effect on the training. ``how`` has the options of ``plimsoll plan`` or ``train`` that
    select it. If nothing fits, ``choices`` is the combination that needs the least memory, and
    ``smallest_budget_bytes`` is the budget for this combination. If the strategy cannot be used, ``impossible`` is the
    reason, and nothing was predicted.
    """

    name: str
    changes: str
    how: str
    choices: tuple[Choice, ...] = ()
    peak: Estimate | None = None
    step_time: Duration | None = None
    smallest_budget_bytes: int | None = None
    impossible: str = ""

    @property
    def fits(self) -> bool:
        """True if the strategy stays under the budget, as far as is known."""
        return not self.impossible and self.smallest_budget_bytes is None


class Strategies(FormerNames, Record):
    """All fine-tuning strategies under one budget. Strategies that leave the training unchanged come first.

    ``subject`` describes the model and the data, and ``device`` the device that the plans are for.
    """

    record_kind: ClassVar[str] = "strategies"
    former_kind: ClassVar[str | None] = "ways"
    former_names: ClassVar[Mapping[str, str]] = {"ways": "strategies"}

    subject: str
    device: str
    limit_bytes: int
    strategies: tuple[Strategy, ...]

    @property
    def fits(self) -> bool:
        """True if any strategy stays under the budget."""
        return any(strategy.fits for strategy in self.strategies)
