"""What mixes that were not traced will probably need and take, from a few that were: only to decide what to trace next.

Within one phase, what techniques take from the bytes that every micro-batch has nearly adds up, and of the bytes that
grow with it each leaves a share; between phases they do neither (a smaller backward does nothing for a peak in the
update), so a peak is the largest of the phases' estimates. A few traces of the plain training give a
line over micro-batches for each phase, and the time between them; a trace of each technique alone says what it takes
from each phase and what time it adds: to the update once, to passes in proportion to what they take. Where small passes
are bound by calls, recomputing in a few large ones is cheap. A trace of a mix corrects what is guessed of that mix and
of those most like it. No plan is made from these guesses: what is chosen is traced as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.plan.look import Look
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Category, Phase
from plimsoll.techniques import Choices

Column = NDArray[Any]

_WORTH_SHARE = 0.01  # of the time or the need
_OF_AN_UPDATE: frozenset[Category] = frozenset({"gradients", "optimizer states"})  # else it is done in passes
_ALIKE = 4  # choices in which mixes may differ for the error of one to be taken for the other's


class _Curve:
    """Straight between known points, and beyond them as between the two nearest."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._x, self._y = np.asarray(sorted(points), dtype=float).T

    def at(self, x: Column) -> Any:
        x = np.asarray(x, dtype=float)
        inside: Column = np.interp(x, self._x, self._y)
        if len(self._x) == 1:
            return inside
        below = self._y[0] + (x - self._x[0]) * (self._y[1] - self._y[0]) / (self._x[1] - self._x[0])
        above = self._y[-1] + (x - self._x[-1]) * (self._y[-1] - self._y[-2]) / (self._x[-1] - self._x[-2])
        return np.where(x < self._x[0], below, np.where(x > self._x[-1], above, inside))


class Surrogate:
    """Guesses bytes and seconds of mixes.

    Args:
        plain: the training without the techniques that are to be learned, at one or more micro-batches.
    """

    def __init__(self, plain: Sequence[Look]) -> None:
        looks = {look.micro_batch: look for look in plain}
        self._largest_phase = max(plain[0].phases, key=lambda phase: _growing(plain[0], phase))
        names: list[Phase] = sorted({phase for look in plain for phase in look.phases})
        self._base = set(plain[0].mix)
        self._alive = {phase: _Curve([(size, _alive(look, phase)) for size, look in looks.items()]) for phase in names}
        self._growing = {
            phase: _Curve([(size, _growing(look, phase)) for size, look in looks.items()]) for phase in names
        }
        self._beyond = _Curve([(size, _beyond(look)) for size, look in looks.items()])
        self._batch_size, self._smallest = max(looks), min(looks)
        passes = {size: self._passes(size) for size in looks}
        points = [(self._batch_size / passes[size], look.seconds / passes[size]) for size, look in looks.items()]
        self._pass_seconds = _Curve(points)
        self._fixed_effect: dict[Choice, dict[Phase, float]] = defaultdict(dict)
        self._growing_share: dict[Choice, dict[Phase, float]] = defaultdict(dict)  # which is left of what grows
        self._added_seconds: dict[Choice, float] = {}
        self._passes_seconds: dict[Choice, float] = {}  # of the training that they were added to
        self._reaches: dict[Choice, frozenset[Category]] = {}
        self._beyond_effect: dict[Choice, float] = {}
        self._saved_bytes: dict[Choice, float] = {}
        self._reference = plain[0]
        self._bytes_off: dict[Choices, dict[int, float]] = {}
        self._seconds_off: dict[Choices, dict[int, float]] = {}

    def learn_effect(
        self, choice: Choice, look: Look, without: Look, reaches: frozenset[Category] = frozenset()
    ) -> None:  # fmt: skip
        """Learn what one choice does, to what its technique reaches, from two traces that differ in it alone."""
        for phase in self._alive:
            after, before = look.phases.get(phase), without.phases.get(phase)
            if after is not None and before is not None:
                grows = before.growing_bytes > 0
                new_bytes = 0 if grows else after.growing_bytes
                self._fixed_effect[choice][phase] = after.fixed_bytes - before.fixed_bytes + new_bytes
                self._growing_share[choice][phase] = after.growing_bytes / before.growing_bytes if grows else 1.0
        self._added_seconds[choice], self._reaches[choice] = look.seconds - without.seconds, reaches
        if not reaches <= _OF_AN_UPDATE:
            self._passes_seconds[choice] = without.seconds
        self._beyond_effect[choice] = _beyond(look) - _beyond(without)
        phases = set(look.phases) & set(without.phases)
        self._saved_bytes[choice] = max(
            (without.need_bytes - look.need_bytes, *(_alive(without, phase) - _alive(look, phase) for phase in phases))
        )
        self._reference = without

    def interpolate(self, choice: Choice, strong: Choice, bytes_share: float, seconds_share: float) -> None:
        """Take a choice to have a share of the effect of a stronger one, if that is known."""
        if strong not in self._added_seconds:
            return
        for phase, effect in self._fixed_effect[strong].items():
            self._fixed_effect[choice][phase] = bytes_share * effect
            self._growing_share[choice][phase] = 1 - bytes_share * (1 - self._growing_share[strong][phase])
        self._beyond_effect[choice] = bytes_share * self._beyond_effect[strong]
        self._added_seconds[choice] = seconds_share * self._added_seconds[strong]
        self._reaches[choice] = self._reaches[strong]
        if strong in self._passes_seconds:
            self._passes_seconds[choice] = self._passes_seconds[strong]

    def correct(self, look: Look) -> None:
        """Learn from a trace of a whole mix."""
        size = np.asarray([look.micro_batch])
        for off, guess, value in (
            (self._bytes_off, self.need_bytes, look.need_bytes),
            (self._seconds_off, self.seconds, look.seconds),
        ):
            points = off.setdefault(look.mix, {})
            points.pop(look.micro_batch, None)
            before = self._off(off, look.mix, size)[0]
            points[look.micro_batch] = float(before + value - guess(look.mix, size)[0])

    def need_bytes(self, mix: Choices, micro_batches: Column) -> Any:
        """Guess the budget that a mix is safe in, for each of several micro-batches."""
        added = [choice for choice in mix if choice not in self._base]
        most = np.zeros(len(micro_batches))
        for phase, curve in self._alive.items():
            fixed = sum(self._fixed_effect[choice].get(phase, 0.0) for choice in added)
            gone = self._growing[phase].at(micro_batches) * (1 - self._share_left(added, phase))
            most = np.maximum(most, curve.at(micro_batches) + fixed - gone)
        beyond = self._beyond.at(micro_batches) + sum(self._beyond_effect.get(choice, 0.0) for choice in added)
        return most + np.maximum(beyond, 0.0) + self._off(self._bytes_off, mix, micro_batches)

    def seconds(self, mix: Choices, micro_batches: Column) -> Any:
        """Guess the time of a step, for each of several micro-batches."""
        plain = self._plain_seconds(micro_batches)
        seconds = plain + self._off(self._seconds_off, mix, micro_batches)
        added = [choice for choice in mix if choice in self._added_seconds and choice not in self._base]
        for choice, share in self._moved_shares(added).items():
            passes_seconds = self._passes_seconds.get(choice)
            seconds += share * self._added_seconds[choice] * (plain / passes_seconds if passes_seconds else 1.0)
        return seconds

    def _plain_seconds(self, micro_batches: Column) -> Any:
        """The time of all passes: of one pass in a line between those traced, whether its calls or its work take it."""
        passes = self._passes(micro_batches)
        samples, smallest = self._batch_size / passes, self._batch_size / self._passes(self._smallest)
        of_smallest = self._pass_seconds.at(smallest)
        # A smaller pass takes no less than its part of the smallest one that was traced, and no more than all of it.
        below = np.clip(self._pass_seconds.at(samples), of_smallest * np.minimum(samples / smallest, 1), of_smallest)
        return passes * np.where(samples < smallest, below, self._pass_seconds.at(samples))

    def _passes(self, micro_batches: Column | int) -> Any:
        return np.ceil(self._batch_size / np.asarray(micro_batches))

    def _share_left(self, added: Sequence[Choice], phase: Phase) -> float:
        """What choices leave of the bytes that grow. What two save of one category (activations) is saved once."""
        left, least = 1.0, dict[frozenset[Category], float]()
        for choice in added:
            share, reaches = self._growing_share[choice].get(phase, 1.0), self._reaches.get(choice, frozenset())
            if len(reaches) == 1:
                least[reaches] = min(share, least.get(reaches, share))
            else:
                left *= share
        return left * prod(least.values())

    def _moved_shares(self, added: Sequence[Choice]) -> dict[Choice, float]:
        """Of the time that each choice adds, the share for what cheaper ones of the same category left it to do."""
        shares, left = dict[Choice, float](), defaultdict[frozenset[Category], float](lambda: 1.0)
        for choice in sorted(added, key=lambda one: self._added_seconds[one]):
            reaches = self._reaches[choice]
            shares[choice] = left[reaches]
            if len(reaches) == 1:
                left[reaches] *= min(1.0, self._growing_share[choice].get(self._largest_phase, 1.0))
        return shares

    def is_useful(self, choice: Choice) -> bool:
        """Whether a choice that was learned saves time, or memory in any phase, that is worth another trace."""
        saves_time = -self._added_seconds[choice] > _WORTH_SHARE * self._reference.seconds
        return saves_time or self._saved_bytes[choice] > _WORTH_SHARE * self._reference.need_bytes

    def is_free(self, choice: Choice) -> bool:
        """Whether a choice that was learned takes no time."""
        return self._added_seconds[choice] <= _WORTH_SHARE * self._reference.seconds

    @staticmethod
    def _off(off: dict[Choices, dict[int, float]], mix: Choices, micro_batches: Column) -> Any:
        """By how much guesses are off: at the sizes that were traced of the mix, or of the one most like it."""
        here = frozenset(mix)
        distances = {other: len(here ^ frozenset(other)) for other, points in off.items() if points}
        near = [other for other, distance in distances.items() if distance <= _ALIKE]
        if not near:
            return np.zeros(len(micro_batches))
        sizes, values = zip(
            *sorted(off[min(near, key=lambda other: (distances[other], str(other)))].items()), strict=True
        )
        return np.interp(np.log2(micro_batches), np.log2(sizes), values)


def _alive(look: Look, phase: Phase) -> float:
    peak = look.phases.get(phase)
    return 0.0 if peak is None else peak.fixed_bytes + peak.growing_bytes


def _growing(look: Look, phase: Phase) -> float:
    peak = look.phases.get(phase)
    return 0.0 if peak is None else peak.growing_bytes


def _beyond(look: Look) -> float:
    """What a peak needs beyond what is alive: process, context, fragmentation, the upper half of the range."""
    return look.need_bytes - max((_alive(look, phase) for phase in look.phases), default=0.0)
