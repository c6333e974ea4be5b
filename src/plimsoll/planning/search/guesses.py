"""What is known and guessed of many mixes at once: of each with each of its micro-batches one row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.search.combinations import Mix, about
from plimsoll.planning.search.evaluation import Look, heap_of
from plimsoll.planning.search.reasons import SAME_SECONDS
from plimsoll.planning.search.surrogate import Column, Surrogate
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import Choices


@dataclass(frozen=True)
class Guesses:
    """Columns: the mix's number, its micro-batch, need and seconds of a step, whether it is possible, and traced."""

    mixes: Sequence[Mix]
    numbers: Column
    sizes: Column
    needs: Column
    seconds: Column
    possible: Column
    traced: Column

    def mix(self, row: int) -> Choices:
        """The choices of a row but for the micro-batch."""
        return self.mixes[int(self.numbers[row])].choices

    def choices(self, row: int) -> Choices:
        """The whole choices of a row."""
        return (micro_batch_choice(int(self.sizes[row])), *self.mix(row))

    def best_of(self, rows: Column) -> Choices | None:
        """Of those about as fast as the fastest, the fewest techniques, then the largest size."""
        if not len(rows):
            return None
        fastest = self.seconds[rows].min()
        near = rows[self.seconds[rows] <= fastest + SAME_SECONDS * abs(fastest)]  # a guess may be below 0
        ranks = ((len(self.mix(row)), -self.sizes[row], self.seconds[row], str(self.mix(row)), row) for row in near)
        return self.choices(min(ranks)[-1])

    def leanest(self) -> Choices:
        """What needs least; of those that need about as little, the fewest techniques."""
        rows = np.flatnonzero(self.needs <= about(self.needs.min())).tolist()
        row = min(rows, key=lambda row: (len(self.mix(row)), self.seconds[row], str(self.choices(row))))
        return self.choices(row)


def guesses_of(
    mixes: Sequence[Mix], surrogates: Mapping[Choice | None, Surrogate], looks: Iterable[Look]
) -> Guesses:  # fmt: skip
    """Return what is known of mixes with each of their sizes: what was traced, or else what is guessed.

    Args:
        mixes: at least one.
        surrogates: of each heap.
        looks: what was traced.
    """
    numbers = np.repeat(np.arange(len(mixes)), [len(mix.sizes) for mix in mixes])
    starts = np.searchsorted(numbers, np.arange(len(mixes)))
    sizes = np.concatenate([mix.sizes for mix in mixes])
    needs, seconds, possible = np.zeros(len(numbers)), np.zeros(len(numbers)), np.ones(len(numbers), dtype=bool)
    of_heap = defaultdict[Choice | None, list[int]](list)
    for number, mix in enumerate(mixes):
        of_heap[heap_of(mix.choices)].append(number)
    for heap, members in of_heap.items():
        rows = np.flatnonzero(np.isin(numbers, members))
        within = np.searchsorted(members, numbers[rows])
        guess = surrogates[heap].guess([mixes[number].choices for number in members], within, sizes[rows])
        needs[rows], seconds[rows] = guess
    is_traced, traced = np.zeros(len(numbers), dtype=bool), defaultdict[Choices, list[Look]](list)
    for look in looks:
        traced[look.mix].append(look)
    for number, mix in enumerate(mixes):
        for look in traced.get(mix.choices, ()):
            for row in starts[number] + np.flatnonzero(mix.sizes == look.micro_batch):
                needs[row], seconds[row], possible[row], is_traced[row] = look.need_bytes, look.seconds, look.fits, True
    return Guesses(mixes, numbers, sizes, needs, seconds, possible, is_traced)
