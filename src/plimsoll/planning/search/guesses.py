"""A table of traced or guessed memory needs and step times, with a row for each combination and micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.search.combinations import Combination, about
from plimsoll.planning.search.evaluation import Evaluation, heap_of
from plimsoll.planning.search.reasons import SAME_SECONDS
from plimsoll.planning.search.surrogate import Column, Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import Choices


@dataclass(frozen=True)
class Guesses:
    """Columns of the table.

    Attributes:
        numbers: index of the row's combination in ``combinations``.
        sizes: micro-batch in samples.
        needs: memory that the combination needs, in bytes.
        seconds: step time in seconds.
        possible: False if the traced combination runs out of memory.
        traced: True if the row comes from a trace, False for a guess.
    """

    combinations: Sequence[Combination]
    numbers: Column
    sizes: Column
    needs: Column
    seconds: Column
    possible: Column
    traced: Column

    def combination(self, row: int) -> Choices:
        """Return the choices of a row without the micro-batch."""
        return self.combinations[int(self.numbers[row])].choices

    def choices(self, row: int) -> Choices:
        """Return all choices of a row."""
        return (micro_batch_choice(int(self.sizes[row])), *self.combination(row))

    def best_of(self, rows: Column) -> Choices | None:
        """Return the choices of the best row: nearly fastest, then fewest techniques, then largest micro-batch.

        Returns ``None`` if ``rows`` is empty.
        """
        if not len(rows):
            return None
        fastest = self.seconds[rows].min()
        near = rows[self.seconds[rows] <= fastest + SAME_SECONDS * abs(fastest)]  # a guessed time may be below 0
        ranks = (
            (len(self.combination(row)), -self.sizes[row], self.seconds[row], str(self.combination(row)), row)
            for row in near
        )
        return self.choices(min(ranks)[-1])

    def leanest(self) -> Choices:
        """Return the choices of the leanest row. If needs are nearly equal, prefer the fewest techniques."""
        rows = np.flatnonzero(self.needs <= about(self.needs.min())).tolist()
        row = min(rows, key=lambda row: (len(self.combination(row)), self.seconds[row], str(self.choices(row))))
        return self.choices(row)


def guesses_of(
    combinations: Sequence[Combination],
    surrogates: Mapping[Choice | None, Surrogate],
    evaluations: Iterable[Evaluation],
) -> Guesses:
    """Return the table for combinations with each of their micro-batches, from traces if available, else guessed.

    Args:
        combinations: one combination or more.
        surrogates: a surrogate for each heap.
        evaluations: the evaluations of traced combinations.
    """
    numbers = np.repeat(np.arange(len(combinations)), [len(combination.sizes) for combination in combinations])
    starts = np.searchsorted(numbers, np.arange(len(combinations)))
    sizes = np.concatenate([combination.sizes for combination in combinations])
    needs, seconds, possible = np.zeros(len(numbers)), np.zeros(len(numbers)), np.ones(len(numbers), dtype=bool)
    of_heap = defaultdict[Choice | None, list[int]](list)
    for number, combination in enumerate(combinations):
        of_heap[heap_of(combination.choices)].append(number)
    for heap, members in of_heap.items():
        rows = np.flatnonzero(np.isin(numbers, members))
        within = np.searchsorted(members, numbers[rows])
        guess = surrogates[heap].guess([combinations[number].choices for number in members], within, sizes[rows])
        needs[rows], seconds[rows] = guess
    is_traced, traced = np.zeros(len(numbers), dtype=bool), defaultdict[Choices, list[Evaluation]](list)
    for evaluation in evaluations:
        traced[evaluation.combination].append(evaluation)
    for number, combination in enumerate(combinations):
        for evaluation in traced.get(combination.choices, ()):
            for row in starts[number] + np.flatnonzero(combination.sizes == evaluation.micro_batch):
                needs[row], seconds[row], possible[row], is_traced[row] = (
                    evaluation.need_bytes,
                    evaluation.seconds,
                    evaluation.fits,
                    True,
                )
    return Guesses(combinations, numbers, sizes, needs, seconds, possible, is_traced)
