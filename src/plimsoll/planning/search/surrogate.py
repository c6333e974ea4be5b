"""A surrogate that guesses the need and step time of untraced combinations from a few traces.

It learns from traces of the plain training and of single techniques on top of it.

Memory is guessed for each phase separately. The effects of the choices on the fixed part are added up. For the part
that grows with the micro-batch, each choice leaves a share. If two choices save memory of the same category, only the
better share counts, and the slower choice moves fewer bytes. The combination needs as much as its largest phase. Memory
beyond live tensors (process, fragmentation) changes in proportion.

The time of a pass is interpolated between the traced passes of the plain training. The time that a choice adds grows
with the time of the passes. Depending on the categories that the choice moves, this time may also be added once per
pass or once per step.

A traced combination corrects the guesses of similar combinations. The plan itself is never a guess, because every
chosen combination is traced as a whole.
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

_WORTH_SHARE = 0.01  # share of the time or the memory need
_FASTER_SHARE = 0.05  # share of the time that a weaker option may save
_WEAKER_SECONDS = 0.5  # share of the time that the strongest option of a technique adds
_OF_AN_UPDATE: frozenset[Category] = frozenset({"gradients", "optimizer states"})
_OF_A_PASS = _OF_AN_UPDATE | {"parameters"}  # moved once in each pass, small or large
_OF_A_PAIR: frozenset[Category] = frozenset({"activations", "gradients"})  # not the categories of an update
_ALIKE = 4  # a combination corrects guesses for combinations that differ in at most this number of choices


class _Curve:
    """A piecewise linear curve through known points, extrapolated at both ends."""

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
    """The effect of one choice.

    Attributes:
        fixed_bytes: bytes added to the fixed part of each phase.
        shares_left: share of the growing bytes that is left in each phase, by phase.
        beyond_share: share of the memory beyond the live tensors that is left.
        beyond_bytes: bytes added to the memory beyond the live tensors.
        saved_bytes: the most bytes saved, either in the whole need or in a phase.
        seconds: seconds added to a step of ``passes`` passes, which take ``passes_seconds`` without the choice.
        reaches: memory categories that the technique can reduce.
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
    """The difference between a trace and a guess. The fields are as in `_Effect`."""

    fixed_bytes: dict[Phase, float]
    shares_left: dict[Phase, float]
    beyond_share: float
    beyond_bytes: float
    seconds: float


_Known = tuple[Column, _Effect]  # a mask of the combinations that have a choice, and the effect of the choice


class Surrogate:
    """Model of the memory need in bytes and the step time in seconds of combinations.

    Args:
        plain: evaluations of the plain training, that is, without the techniques to learn, at one or more
            micro-batches.
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
        self._supposed: dict[Choice, Choice] = {}  # and the stronger option whose effect was supposed for it
        self._pairs: dict[tuple[Choice, Choice], _Effect] = {}
        self._reference = plain[0]
        self._off: dict[Choices, dict[int, tuple[float, float]]] = {}  # errors (bytes, s) by combination and size

    def copied(self) -> Surrogate:
        """Return a copy. Effects that the copy learns do not change this object."""
        other = copy(self)
        other._effects, other._supposed = dict(self._effects), dict(self._supposed)
        other._off = {combination: dict(points) for combination, points in self._off.items()}
        return other

    def learn_effect(
        self, choice: Choice, evaluation: Evaluation, without: Evaluation, reaches: frozenset[Category] = frozenset()
    ) -> None:
        """Learn the effect of one choice from two traces that differ only in this choice.

        Args:
            choice: the choice.
            evaluation: the evaluation with the choice.
            without: the evaluation without the choice.
            reaches: memory categories that the technique of the choice can reduce.
        """
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
        """Learn, from a trace with two choices, how much their joint effect differs from their separate effects."""
        self._pairs[first, second] = _Effect(
            **self._difference(evaluation)._asdict(),
            saved_bytes=0.0,
            passes=self._passes(evaluation.micro_batch),
            passes_seconds=float(self._plain_seconds(np.asarray([evaluation.micro_batch]))[0]),
            reaches=_OF_A_PAIR,
        )

    def interpolate(self, choice: Choice, strong: Choice, bytes_share: float, seconds_share: float) -> None:
        """Set the effect of a choice to shares (bytes and seconds) of the known effect of a stronger option."""
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
        """Guess that a weaker option saves as much memory as a stronger one, in less time.

        The guess is used until a combination with the weaker option is traced.
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
        """Learn from a traced combination.

        If the effects of some of its choices were only supposed, they are first replaced by effects that explain the
        trace.
        """
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
        """Attribute the error of a guess to one choice. Its effect cannot become slower than the stronger option's."""
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
        """Return the difference between a trace and the summed effects of its choices."""
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
        """Guess the needs in bytes and the step times in seconds of combinations.

        Args:
            combinations: the combinations, without micro-batches.
            numbers: (N,) int64, the index of the combination for each guess.
            micro_batches: (N,) int64, the samples of a micro-batch for each guess.

        Returns:
            memory needs (N,) and step times (N,).
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
        """Return the fixed and the growing bytes that are alive at the peak of a phase."""
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
            if len(effect.reaches) == 1:  # a cheaper choice of the same category leaves fewer bytes to move
                share = min(1.0, effect.shares_left.get(self._largest_phase, 1.0))
                left[effect.reaches] = left[effect.reaches] * np.where(has, share, 1.0)
        return seconds

    def _plain_seconds(self, micro_batches: Column) -> Any:
        """Return the time of all passes; one pass is interpolated linearly between traced micro-batches."""
        passes = self._passes(micro_batches)
        samples, smallest = self._batch_size / passes, self._batch_size / self._passes(self._smallest)
        of_smallest = self._pass_seconds.at(smallest)
        # A smaller pass takes at least its share of the time of the smallest traced pass, and at most all that time.
        below = np.clip(self._pass_seconds.at(samples), of_smallest * np.minimum(samples / smallest, 1), of_smallest)
        return passes * np.where(samples < smallest, below, self._pass_seconds.at(samples))

    def _passes(self, micro_batches: Column | int) -> Any:
        return np.ceil(self._batch_size / np.asarray(micro_batches))

    @staticmethod
    def _share_left(known: Sequence[_Known], phase: Phase, num_combinations: int) -> Column:
        """Return the share of the growing bytes that is left in a phase. Savings in the same category count once."""
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
        """Return whether a learned choice saves enough time or memory to be worth another trace."""
        effect = self._effects[choice]
        saves_time = -effect.seconds > _WORTH_SHARE * self._reference.seconds
        return saves_time or effect.saved_bytes > _WORTH_SHARE * self._reference.need_bytes

    def is_free(self, choice: Choice) -> bool:
        """Return whether a learned choice adds no time."""
        return self._effects[choice].seconds <= _WORTH_SHARE * self._reference.seconds

    def _off_of(self, members: _Members, numbers: Column, micro_batches: Column) -> tuple[Column, Column]:
        """Return the bytes and seconds to add to guesses, taken from the most similar combination that was traced.

        Between the traced micro-batches of this combination, corrections are interpolated.
        """
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
    """A membership table of combinations: which choices each of them contains."""

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
        """Return whether any combination contains the choice."""
        return choice in self._places

    def of(self, choice: Choice) -> Column:
        """Return a mask of the combinations that contain a choice."""
        found: Column = self._has[:, self._places[choice]] > 0
        return found

    def distances(self, combination: Choices) -> Column:
        """Return the number of choices in which each combination of the table differs from ``combination``."""
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
    """Return the share of ``before`` that is left, at most 1."""
    return min(max(after, 0.0) / before, 1.0) if before > 0 else 1.0


def _beyond(evaluation: Evaluation) -> float:
    """Return the bytes of the need beyond live tensors: process, context, fragmentation, error margin."""
    return evaluation.need_bytes - max((_alive(evaluation, phase) for phase in evaluation.phases), default=0.0)
