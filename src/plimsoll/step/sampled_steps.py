"""A schedule of the steps to inspect closely: the first steps, then ever fewer, so that the cost becomes negligible."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PAUSE_STEPS = 200


@dataclass(slots=True)
class SampledSteps:
    """A counter that selects the steps to inspect: 1, 2, 3, ..., 8, 10, 12, ..., and from step 800 on every 200th."""

    num_steps: int = 0
    next_look: int = 1

    @property
    def is_due(self) -> bool:
        """True if the current step is to be inspected."""
        return self.num_steps + 1 >= self.next_look

    def passed(self, *, looked: bool) -> None:
        """Count a step. If it was inspected (``looked``), schedule the next inspection."""
        self.num_steps += 1
        if looked:
            self.next_look = self.num_steps + min(max(self.num_steps // 4, 1), _LONGEST_PAUSE_STEPS)
