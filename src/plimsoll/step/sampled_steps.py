"""Which of many steps are looked at closely: the first ones, then ever fewer, so that it costs little in the end."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_PAUSE_STEPS = 200


@dataclass(slots=True)
class SampledSteps:
    """Counts steps: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, ... are due, and from step 800 on every 200."""

    num_steps: int = 0
    next_look: int = 1

    @property
    def is_due(self) -> bool:
        """Whether the step that is running is to be looked at."""
        return self.num_steps + 1 >= self.next_look

    def passed(self, *, looked: bool) -> None:
        """Count a step, which was looked at or not."""
        self.num_steps += 1
        if looked:
            self.next_look = self.num_steps + min(max(self.num_steps // 4, 1), _LONGEST_PAUSE_STEPS)
