"""Fine-tuning strategies within a budget, side by side: the memory and time each takes, and what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.plan import Choice, Duration
from plimsoll.records.prediction import Estimate


class Strategy(Frozen):
    """One fine-tuning strategy, with the fastest plan that was found for it.

    ``changes`` says what it changes of the training, and ``how`` what to give to ``plimsoll plan`` or ``train`` for it.
    Where nothing fits, ``choices`` has what needs least and ``smallest_budget_bytes`` the budget it would take; where
    it cannot be done at all, ``impossible`` says why, and there are no numbers.
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
        """Whether it stays under the budget, as far as is known."""
        return not self.impossible and self.smallest_budget_bytes is None


class Strategies(FormerNames, Record):
    """Every strategy, the exact ones first; ``subject`` says what is trained, and ``device`` where."""

    record_kind: ClassVar[str] = "strategies"
    former_kind: ClassVar[str | None] = "ways"
    former_names: ClassVar[Mapping[str, str]] = {"ways": "strategies"}

    subject: str
    device: str
    limit_bytes: int
    strategies: tuple[Strategy, ...]

    @property
    def fits(self) -> bool:
        """Whether one of them stays under the budget."""
        return any(strategy.fits for strategy in self.strategies)
