"""Guesses of combinations that were not traced, from traces of the plain training and of single techniques.

Each phase is guessed by itself: what does not depend on the micro-batch changes by the sum of the effects of the
choices, and of what grows with it each leaves a share; of two that save the same category the better one's share is
left, and the slower one has only the rest to move. The need is that of the phase with the most, and what comes on top
(the process, fragmentation) changes in proportion. The time is that of the plain training, whose passes take what a
line between the traced ones says. What a choice adds grows with what the passes take in all; by what it reaches it may
also be done once in each pass, whatever its size, or once a step. A whole combination that was traced corrects the
guesses of combinations that are like it; nothing that is chosen stays a guess: it is traced as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.plan import Choice
from plimsoll.records.trace import Category, Phase
from plimsoll.techniques import Choices

Column = NDArray[Any]

_WORTH_SHARE = 0.01  # of the time or the need
_FASTER_SHARE = 0.05  # of the time, which a weaker option may save
_WEAKER_SECONDS = 0.5  # of the time that the strongest option of a technique adds
_OF_AN_UPDATE: frozenset[Category] = frozenset({"gradients", "optimizer states"})
_OF_A_PASS = _OF_AN_UPDATE | {"parameters"}  # moved in each pass, whatever its size
_OF_A_PAIR: frozenset[Category] = frozenset({"activations", "gradients"})  # no single one, and none of an update
_ALIKE = 4  # choices in which combinations may differ for the error of one to be taken for the other's


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


@dataclass(frozen=True)
class _Effect:
    """What one choice does.

    Of each phase the bytes that it adds (``fixed_bytes``) and what it leaves of those that grow (``shares_left``);
    ``beyond_share`` of what comes on top, with ``beyond_bytes`` more; ``seconds`` that it adds to a step of so many
    passes, which take ``passes_seconds``.
    """

    fixed_bytes: dict[Phase, float]
    shares_left: dict[Phase, float]
    beyond_share: float
    beyond_bytes: float
    saved_bytes: float
    seconds: float
    passes: int
    passes_seconds: float
    reaches: frozenset[Category]


class _Difference(NamedTuple):
    """Of a trace from a guess: bytes of each phase, the share of those that grow, of what comes on top, and seconds."""

    fixed_bytes: dict[Phase, float]
    shares_left: dict[Phase, float]
    beyond_share: float
    beyond_bytes: float
    seconds: float


_Known = tuple[Column, _Effect]  # which of the combinations have a choice, and what it does


class Surrogate:
    """Guesses bytes and seconds of combinations.

    Args:
        plain: the training without the techniques that are to be learned, at one or more micro-batches.
    """

    def __init__(self, plain: Sequence[Evaluation]) -> None:
        evaluations = {evaluation.micro_batch: evaluation for evaluation in plain}
        self._largest_phase = max(plain[0].phases, key=lambda phase: _growing(plain[0], phase))
        names: list[Phase] = sorted({phase for evaluation in plain for phase in evaluation.phases})
        self._base = set(plain[0].combination)
        self._alive = {
            phase: _Curve([(size, _alive(evaluation, phase)) for size, evaluation in evaluations.items()])
            for phase in names
        }
        self._growing = {
            phase: _Curve([(size, _growing(evaluation, phase)) for size, evaluation in evaluations.items()])
            for phase in names
        }
        self._beyond = _Curve([(size, _beyond(evaluation)) for size, evaluation in evaluations.items()])
        self._batch_size, self._smallest = max(evaluations), min(evaluations)
        passes = {size: self._passes(size) for size in evaluations}
        points = [
            (self._batch_size / passes[size], evaluation.seconds / passes[size])
            for size, evaluation in evaluations.items()
        ]
        self._pass_seconds = _Curve(points)
        self._effects: dict[Choice, _Effect] = {}
        self._supposed: dict[Choice, Choice] = {}  # and the stronger one that it was supposed from
        self._pairs: dict[tuple[Choice, Choice], _Effect] = {}
        self._reference = plain[0]
        self._off: dict[Choices, dict[int, tuple[float, float]]] = {}  # bytes and seconds, by combination and size

    def copied(self) -> Surrogate:
        """Return one that learns by itself from what comes."""
        other = copy(self)
        other._effects, other._supposed = dict(self._effects), dict(self._supposed)
        other._off = {combination: dict(points) for combination, points in self._off.items()}
        return other

    def learn_effect(
        self, choice: Choice, evaluation: Evaluation, without: Evaluation, reaches: frozenset[Category] = frozenset()
    ) -> None:
        """Learn what one choice does, to what its technique reaches, from two traces that differ in it alone."""
        fixed, shares = dict[Phase, float](), dict[Phase, float]()
        phases = [phase for phase in self._alive if phase in evaluation.phases and phase in without.phases]
        for phase in phases:
            after, before = evaluation.phases[phase], without.phases[phase]
            grows = before.growing_bytes > 0
            new_bytes = 0 if grows else after.growing_bytes
            fixed[phase] = after.fixed_bytes - before.fixed_bytes + new_bytes
            shares[phase] = after.growing_bytes / before.growing_bytes if grows else 1.0
        self._effects[choice] = _Effect(
            fixed_bytes=fixed,
            shares_left=shares,
            beyond_share=_share(_beyond(evaluation), _beyond(without)),
            beyond_bytes=max(_beyond(evaluation) - max(_beyond(without), 0.0), 0.0),
            saved_bytes=max(
                (
                    without.need_bytes - evaluation.need_bytes,
                    *(_alive(without, one) - _alive(evaluation, one) for one in phases),
                )
            ),
            seconds=evaluation.seconds - without.seconds,
            passes=self._passes(evaluation.micro_batch),
            passes_seconds=without.seconds,
            reaches=reaches,
        )
        self._reference = without

    def learn_pair(self, first: Choice, second: Choice, evaluation: Evaluation) -> None:
        """Learn from a trace of both what two choices do beyond what each does alone."""
        self._pairs[first, second] = _Effect(
            **self._difference(evaluation)._asdict(),
            saved_bytes=0.0,
            passes=self._passes(evaluation.micro_batch),
            passes_seconds=float(self._plain_seconds(np.asarray([evaluation.micro_batch]))[0]),
            reaches=_OF_A_PAIR,
        )

    def interpolate(self, choice: Choice, strong: Choice, bytes_share: float, seconds_share: float) -> None:
        """Take a choice to have a share of the effect of a stronger one, if that is known."""
        effect = self._effects.get(strong)
        if effect is not None:
            self._effects[choice] = replace(
                effect,
                fixed_bytes={phase: bytes_share * one for phase, one in effect.fixed_bytes.items()},
                shares_left={phase: 1 - bytes_share * (1 - one) for phase, one in effect.shares_left.items()},
                beyond_share=1 - bytes_share * (1 - effect.beyond_share),
                beyond_bytes=bytes_share * effect.beyond_bytes,
                seconds=seconds_share * effect.seconds,
            )

    def suppose(self, choice: Choice, strong: Choice, may_be_faster: bool) -> None:
        """Take a weaker choice to do as much as a stronger one in less time, until it is in a combination that is
        traced.
        """
        effect = self._effects.get(strong)
        if effect is not None:
            seconds = _WEAKER_SECONDS * effect.seconds
            if may_be_faster:
                seconds = min(
                    effect.seconds - _WORTH_SHARE * effect.passes_seconds, -_FASTER_SHARE * effect.passes_seconds
                )
            self._effects[choice] = replace(effect, seconds=seconds)
            self._supposed[choice] = strong

    def correct(self, evaluation: Evaluation) -> None:
        """Learn from a trace of a whole combination; what was only supposed of a choice is put right first."""
        size = np.asarray([evaluation.micro_batch])
        for choice in [one for one in evaluation.combination if one in self._supposed]:
            self._put_right(choice, self._supposed.pop(choice), evaluation)
        points = self._off.setdefault(evaluation.combination, {})
        points.pop(evaluation.micro_batch, None)
        off = self._off_of(_Members([evaluation.combination]), np.zeros(1, dtype=int), size)
        guess = self.guess([evaluation.combination], np.zeros(1, dtype=int), size)
        known = zip(off, guess, (evaluation.need_bytes, evaluation.seconds), strict=True)
        need_off, seconds_off = (float(before[0] + value - guessed[0]) for before, guessed, value in known)
        points[evaluation.micro_batch] = (need_off, seconds_off)

    def _put_right(self, choice: Choice, strong: Choice, evaluation: Evaluation) -> None:
        """Take what a guess of a combination is off by to be due to one choice in it, no slower than a stronger one."""
        effect = self._effects[choice]
        asked = [evaluation.combination], np.zeros(1, dtype=int), np.asarray([evaluation.micro_batch])
        seconds, off = float(self.guess(*asked)[1][0]), self._difference(evaluation)
        self._effects[choice] = replace(effect, seconds=effect.seconds + 1)
        of_a_second = float(self.guess(*asked)[1][0]) - seconds
        self._effects[choice] = replace(
            effect,
            fixed_bytes={phase: one + off.fixed_bytes.get(phase, 0.0) for phase, one in effect.fixed_bytes.items()},
            shares_left={phase: one * off.shares_left.get(phase, 1.0) for phase, one in effect.shares_left.items()},
            beyond_share=effect.beyond_share * off.beyond_share,
            beyond_bytes=effect.beyond_bytes + off.beyond_bytes,
            seconds=min(
                effect.seconds + (evaluation.seconds - seconds) / (of_a_second or 1.0), self._effects[strong].seconds
            ),
        )

    def _difference(self, evaluation: Evaluation) -> _Difference:
        """By what the sum of the effects of its choices is off from a trace."""
        known = self._known(_Members([evaluation.combination]))
        asked = np.zeros(1, dtype=int), np.asarray([evaluation.micro_batch])
        fixed, shares = dict[Phase, float](), dict[Phase, float]()
        for phase in self._alive.keys() & evaluation.phases.keys():
            fixed_bytes, growing_bytes = (float(one[0]) for one in self._phase_bytes(known, phase, *asked))
            fixed[phase] = evaluation.phases[phase].fixed_bytes - fixed_bytes
            shares[phase] = evaluation.phases[phase].growing_bytes / growing_bytes if growing_bytes > 0 else 1.0
        beyond = float(self._beyond_bytes(known, *asked)[0])
        return _Difference(
            fixed,
            shares,
            _share(_beyond(evaluation), beyond),
            max(_beyond(evaluation) - beyond, 0.0),
            evaluation.seconds - float(self._seconds(known, *asked)[0]),
        )

    def guess(self, combinations: Sequence[Choices], numbers: Column, micro_batches: Column) -> tuple[Column, Column]:
        """Guess the budget that combinations are safe in, and the seconds of a step.

        Args:
            combinations: without micro-batches.
            numbers: of each guess the number of its combination.
            micro_batches: of each guess, in samples.
        """
        members = _Members(combinations)
        known = self._known(members)
        needs = self._beyond_bytes(known, numbers, micro_batches)
        phases = [self._phase_bytes(known, phase, numbers, micro_batches) for phase in self._alive]
        needs += np.max([fixed + growing for fixed, growing in phases], axis=0)
        off_bytes, off_seconds = self._off_of(members, numbers, micro_batches)
        return np.rint(needs + off_bytes), self._seconds(known, numbers, micro_batches) + off_seconds

    def _known(self, members: _Members) -> list[_Known]:
        learned = [choice for choice in self._effects if choice not in self._base and choice in members]
        found = [(members.of(choice), self._effects[choice]) for choice in learned]
        for (first, second), effect in self._pairs.items():
            if first in members and second in members:
                found.append((members.of(first) & members.of(second), effect))
        return found

    def _phase_bytes(
        self, known: Sequence[_Known], phase: Phase, numbers: Column, micro_batches: Column
    ) -> tuple[Column, Column]:
        """Of what is alive at the peak of a phase, what does not grow with the micro-batch and what does."""
        num_combinations, growing = numbers.max(initial=0) + 1, self._growing[phase].at(micro_batches)
        added = sum((has * effect.fixed_bytes.get(phase, 0.0) for has, effect in known), np.zeros(num_combinations))
        fixed = self._alive[phase].at(micro_batches) - growing + added[numbers]
        return fixed, growing * self._share_left(known, phase, num_combinations)[numbers]

    def _beyond_bytes(self, known: Sequence[_Known], numbers: Column, micro_batches: Column) -> Any:
        left, added = np.ones(numbers.max(initial=0) + 1), np.zeros(numbers.max(initial=0) + 1)
        for has, effect in known:
            left *= np.where(has, effect.beyond_share, 1.0)
            added += has * effect.beyond_bytes
        return np.maximum(self._beyond.at(micro_batches), 0.0) * left[numbers] + added[numbers]

    def _seconds(self, known: Sequence[_Known], numbers: Column, micro_batches: Column) -> Any:
        plain, passes = self._plain_seconds(micro_batches), self._passes(micro_batches)
        seconds = plain.copy()
        left = defaultdict[frozenset[Category], Any](lambda: np.ones(numbers.max(initial=0) + 1))
        for has, effect in sorted(known, key=lambda one: one[1].seconds):
            added = (has * left[effect.reaches])[numbers] * effect.seconds
            if effect.reaches <= _OF_AN_UPDATE:
                seconds += added
            elif effect.reaches <= _OF_A_PASS:
                seconds += added * passes / effect.passes
            else:
                seconds += added * plain / effect.passes_seconds
            if len(effect.reaches) == 1:  # what cheaper ones of the same category leave to do
                share = min(1.0, effect.shares_left.get(self._largest_phase, 1.0))
                left[effect.reaches] = left[effect.reaches] * np.where(has, share, 1.0)
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

    @staticmethod
    def _share_left(known: Sequence[_Known], phase: Phase, num_combinations: int) -> Column:
        """What choices leave of the bytes that grow. What two save of one category (activations) is saved once."""
        left, least = np.ones(num_combinations), dict[frozenset[Category], Column]()
        for has, effect in known:
            share = effect.shares_left.get(phase, 1.0)
            if len(effect.reaches) == 1:
                before = least.get(effect.reaches, np.full(num_combinations, np.inf))
                least[effect.reaches] = np.minimum(before, np.where(has, share, np.inf))
            else:
                left *= np.where(has, share, 1.0)
        for share_left in least.values():
            left *= np.where(np.isinf(share_left), 1.0, share_left)
        return left

    def is_useful(self, choice: Choice) -> bool:
        """Whether a choice that was learned saves time, or memory in any phase, that is worth another trace."""
        effect = self._effects[choice]
        saves_time = -effect.seconds > _WORTH_SHARE * self._reference.seconds
        return saves_time or effect.saved_bytes > _WORTH_SHARE * self._reference.need_bytes

    def is_free(self, choice: Choice) -> bool:
        """Whether a choice that was learned takes no time."""
        return self._effects[choice].seconds <= _WORTH_SHARE * self._reference.seconds

    def _off_of(self, members: _Members, numbers: Column, micro_batches: Column) -> tuple[Column, Column]:
        """By how much guesses are off: at the sizes that were traced of the combination, or of the one most like it."""
        off_bytes, off_seconds = np.zeros(len(numbers)), np.zeros(len(numbers))
        known = sorted((combination for combination, points in self._off.items() if points), key=str)
        if known:
            distances = np.stack([members.distances(combination) for combination in known])
            nearest = np.where(distances.min(axis=0) <= _ALIKE, distances.argmin(axis=0), -1)[numbers]
            for place, combination in enumerate(known):
                rows, points = nearest == place, sorted(self._off[combination].items())
                sizes, at = np.log2([size for size, _ in points]), np.log2(micro_batches[rows])
                off_bytes[rows] = np.interp(at, sizes, [one for _, (one, _) in points])
                off_seconds[rows] = np.interp(at, sizes, [one for _, (_, one) in points])
        return off_bytes, off_seconds


class _Members:
    """Which choices each of many combinations has, in columns."""

    def __init__(self, combinations: Sequence[Choices]) -> None:
        self._places: dict[Choice, int] = {}
        columns = [
            [self._places.setdefault(choice, len(self._places)) for choice in combination]
            for combination in combinations
        ]
        self._has = np.zeros((len(combinations), len(self._places)), dtype=np.int64)
        for number, places in enumerate(columns):
            self._has[number, places] = 1

    def __contains__(self, choice: Choice) -> bool:
        """Whether any of them has it."""
        return choice in self._places

    def of(self, choice: Choice) -> Column:
        """Which of them have a choice."""
        found: Column = self._has[:, self._places[choice]] > 0
        return found

    def distances(self, combination: Choices) -> Column:
        """In how many choices each of them and another combination differ."""
        places = [self._places[choice] for choice in combination if choice in self]
        found: Column = self._has.sum(axis=1) + len(combination) - 2 * self._has[:, places].sum(axis=1)
        return found


def _alive(evaluation: Evaluation, phase: Phase) -> float:
    peak = evaluation.phases.get(phase)
    return 0.0 if peak is None else peak.fixed_bytes + peak.growing_bytes


def _growing(evaluation: Evaluation, phase: Phase) -> float:
    peak = evaluation.phases.get(phase)
    return 0.0 if peak is None else peak.growing_bytes


def _share(after: float, before: float) -> float:
    """What is left, which is all of it at most."""
    return min(max(after, 0.0) / before, 1.0) if before > 0 else 1.0


def _beyond(evaluation: Evaluation) -> float:
    """What a peak needs beyond what is alive: process, context, fragmentation, the upper half of the range."""
    return evaluation.need_bytes - max((_alive(evaluation, phase) for phase in evaluation.phases), default=0.0)
