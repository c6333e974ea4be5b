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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.plan.look import Look
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Phase
from plimsoll.techniques import Choices

Column = NDArray[Any]

_ALIKE = 2  # choices in which mixes may differ for the error of one to be taken for the other's


@dataclass(frozen=True)
class _Line:
    """``constant + slope * x``."""

    constant: float
    slope: float

    def at(self, x: Any) -> Any:
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
        size = np.asarray([look.micro_batch])
        for off, guess, value in (
            (self._bytes_off, self.need_bytes, look.need_bytes),
            (self._seconds_off, self.seconds, look.seconds),
        ):
            before = self._nearest(off, look.mix)
            off[look.mix] = before + value - float(guess(look.mix, size)[0])

    def need_bytes(self, mix: Choices, micro_batches: Column) -> Column:
        """Guess the budget that a mix is safe in, for each of several micro-batches."""
        added = [choice for choice in mix if choice not in self._base]
        most = np.zeros(len(micro_batches))
        for phase, line in self._alive.items():
            fixed = sum(self._fixed_effect[choice].get(phase, 0.0) for choice in added)
            growing = sum(self._growing_effect[choice].get(phase, 0.0) for choice in added)
            most = np.maximum(most, line.constant + fixed + micro_batches * max(line.slope + growing, 0.0))
        beyond = self._beyond.at(micro_batches) + sum(self._beyond_effect.get(choice, 0.0) for choice in added)
        return most + np.maximum(beyond, 0.0) + self._nearest(self._bytes_off, mix)

    def seconds(self, mix: Choices, micro_batches: Column) -> Column:
        """Guess the time of a step, for each of several micro-batches."""
        added = sum(self._added_seconds.get(choice, 0.0) for choice in mix if choice not in self._base)
        return self._seconds.at(self._pieces(micro_batches)) + added + self._nearest(self._seconds_off, mix)

    def is_useful(self, choice: Choice) -> bool:
        """Whether a choice that was learned saves time, or memory in any phase."""
        effects = (*self._fixed_effect[choice].values(), *self._growing_effect[choice].values())
        least = min((*effects, self._beyond_effect[choice]))
        return least < 0 or self._added_seconds[choice] < 0

    @staticmethod
    def _nearest(off: dict[Choices, float], mix: Choices) -> float:
        """By how much the guess was off for the mix itself, or for the one most like it."""
        here = frozenset(mix)
        distances = {other: len(here ^ frozenset(other)) for other in off}
        near = [other for other, distance in distances.items() if distance <= _ALIKE]
        return off[min(near, key=lambda other: (distances[other], str(other)))] if near else 0.0

    def _pieces(self, micro_batches: Any) -> Any:
        return -(-self._batch_size // micro_batches)


def _alive(look: Look, phase: Phase) -> float:
    peak = look.phases.get(phase)
    return 0.0 if peak is None else peak.fixed_bytes + peak.growing_bytes


def _beyond(look: Look) -> float:
    """What a peak needs beyond what is alive: process, context, fragmentation, the upper half of the range."""
    return look.need_bytes - max((_alive(look, phase) for phase in look.phases), default=0.0)
