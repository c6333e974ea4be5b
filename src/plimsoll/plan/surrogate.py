"""What mixes that were not traced will probably need and take, from a few that were: only to decide what to trace next.

Within one phase the effects of techniques nearly add up; between phases they do not (a smaller backward does nothing
for a peak in the update), so a peak is the largest of the phases' estimates. Two traces of the plain training give a
line over micro-batches for each phase; a trace of each technique alone says what it takes from each phase and what
time it adds. A trace of a mix corrects what is guessed of that mix. No plan is made from these guesses: what is chosen
is traced as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from plimsoll.plan.look import Look
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Phase
from plimsoll.techniques import Choices


@dataclass(frozen=True)
class _Line:
    """``constant + slope * x``."""

    constant: float
    slope: float

    def at(self, x: float) -> float:
        return self.constant + self.slope * x

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> _Line:
        if first[0] == second[0]:
            return cls(first[1], 0.0)
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)


class Surrogate:
    """Guesses bytes and seconds of mixes.

    Args:
        small: the plain training at a small micro-batch.
        large: the plain training at a larger one, or the same look.
        batch_size: samples of a step.
    """

    def __init__(self, small: Look, large: Look, batch_size: int) -> None:
        self._batch_size = batch_size
        sizes = small.micro_batch, large.micro_batch
        names: list[Phase] = sorted(set(small.phases) | set(large.phases))
        self._base = set(small.mix)
        self._alive = {
            phase: _Line.through(
                *((size, _alive(look, phase)) for size, look in zip(sizes, (small, large), strict=True))
            )
            for phase in names
        }
        self._beyond = _Line.through((sizes[0], _beyond(small)), (sizes[1], _beyond(large)))
        self._seconds = _Line.through((self._pieces(sizes[0]), small.seconds), (self._pieces(sizes[1]), large.seconds))
        self._fixed_effect: dict[Choice, dict[Phase, float]] = defaultdict(dict)
        self._growing_effect: dict[Choice, dict[Phase, float]] = defaultdict(dict)
        self._added_seconds: dict[Choice, float] = {}
        self._beyond_effect: dict[Choice, float] = {}
        self._bytes_off: dict[Choices, float] = {}
        self._seconds_off: dict[Choices, float] = {}

    def knows(self, choice: Choice) -> bool:
        """Whether the effect of a choice was learned."""
        return choice in self._added_seconds or choice in self._base

    def learn_effect(self, choice: Choice, look: Look, without: Look) -> None:
        """Learn what one choice does, from two traces that differ in it alone."""
        for phase in self._alive:
            after, before = look.phases.get(phase), without.phases.get(phase)
            if after is not None and before is not None:
                self._fixed_effect[choice][phase] = after.fixed_bytes - before.fixed_bytes
                self._growing_effect[choice][phase] = (after.growing_bytes - before.growing_bytes) / look.micro_batch
        self._added_seconds[choice] = look.seconds - without.seconds
        self._beyond_effect[choice] = _beyond(look) - _beyond(without)

    def interpolate(self, choice: Choice, strong: Choice, share: float) -> None:
        """Take a choice to have a share of the effect of a stronger one."""
        for effects in (self._fixed_effect, self._growing_effect):
            effects[choice] = {phase: share * value for phase, value in effects[strong].items()}
        self._added_seconds[choice] = share * self._added_seconds[strong]
        self._beyond_effect[choice] = share * self._beyond_effect[strong]

    def correct(self, look: Look) -> None:
        """Learn from a trace of a whole mix."""
        self._bytes_off.pop(look.mix, None)
        self._seconds_off.pop(look.mix, None)
        self._bytes_off[look.mix] = look.need_bytes - self.need_bytes(look.mix, look.micro_batch)
        self._seconds_off[look.mix] = look.seconds - self.seconds(look.mix, look.micro_batch)

    def need_bytes(self, mix: Choices, micro_batch: int) -> float:
        """Guess the budget a mix is safe in."""
        added = [choice for choice in mix if choice not in self._base]
        most = 0.0
        for phase, line in self._alive.items():
            fixed = sum(self._fixed_effect[choice].get(phase, 0.0) for choice in added)
            growing = sum(self._growing_effect[choice].get(phase, 0.0) for choice in added)
            most = max(most, line.constant + fixed + micro_batch * max(line.slope + growing, 0.0))
        beyond = self._beyond.at(micro_batch) + sum(self._beyond_effect.get(choice, 0.0) for choice in added)
        return most + max(beyond, 0.0) + self._bytes_off.get(mix, 0.0)

    def seconds(self, mix: Choices, micro_batch: int) -> float:
        """Guess the time of a step."""
        added = sum(self._added_seconds.get(choice, 0.0) for choice in mix if choice not in self._base)
        return self._seconds.at(self._pieces(micro_batch)) + added + self._seconds_off.get(mix, 0.0)

    def _pieces(self, micro_batch: int) -> int:
        return -(-self._batch_size // micro_batch)


def _alive(look: Look, phase: Phase) -> float:
    peak = look.phases.get(phase)
    return 0.0 if peak is None else peak.fixed_bytes + peak.growing_bytes


def _beyond(look: Look) -> float:
    """What a peak needs beyond what is alive: process, context, fragmentation, the upper half of the range."""
    return look.need_bytes - max((_alive(look, phase) for phase in look.phases), default=0.0)
