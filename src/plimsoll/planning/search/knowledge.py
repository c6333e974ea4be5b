"""The state of a search: its evaluations, the learned effects of techniques, and their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from plimsoll.planning.search.block_options import some_blocks
from plimsoll.planning.search.choices import AvailableChoices, Problem
from plimsoll.planning.search.combinations import Allows, Combination, combinations_of
from plimsoll.planning.search.evaluation import Evaluation, in_heap
from plimsoll.planning.search.guesses import Guesses, guesses_of
from plimsoll.planning.search.prefetch import as_guessed
from plimsoll.planning.search.reasons import SAME_SECONDS
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice
from plimsoll.techniques import Choices, technique_of

_GUESSES_OFF = 0.025  # share of the limit: a guess with less headroom is traced only if no other combination may fit


class Known:
    """The state of a search: evaluations, a surrogate for each heap, and the options of each useful technique.

    ``only_guessed`` are options that are in no traced combination yet.
    """

    def __init__(self, available: AvailableChoices, required: frozenset[str], allows: Allows) -> None:
        self._available, self._required, self._allows = available, required, allows
        self.evaluations: dict[Choices, Evaluation] = {}
        self.surrogates: dict[Choice | None, Surrogate] = {}
        self.learned: dict[str, list[Choice]] = {}
        self.only_guessed: set[Choice] = set()
        self._combinations_of: dict[str, list[Choice]] | None = None
        self._combinations: list[Combination] = []

    def copied(self) -> Known:
        """Return a copy. Effects that the copy learns do not change this object."""
        other = copy(self)
        other.evaluations, other.only_guessed = dict(self.evaluations), set(self.only_guessed)
        other.surrogates = {heap: surrogate.copied() for heap, surrogate in self.surrogates.items()}
        return other

    def take_guess(self, choices: Choices) -> None:
        """Store a guess as the evaluation of these choices, for each heap, as if they had been traced."""
        for heap, surrogate in self.surrogates.items():
            alike = in_heap(choices, heap)
            if self._allows(alike):
                self.evaluations[alike] = as_guessed(alike, surrogate, self.evaluations.values())
        self.only_guessed.difference_update(choices)

    def suppose(self, weaker: Sequence[Choice], strongest: Choice) -> Sequence[Choice]:
        """Suppose that weaker options save as much memory as the strongest, in less time. Return the weaker options.

        An option is supposed to do so until it is traced.
        """
        for choice in weaker:
            for surrogate in self.surrogates.values():
                surrogate.suppose(choice, strongest, technique_of(choice.technique).may_be_faster)
        self.only_guessed.update(weaker)
        return weaker

    def blocks(self, problem: Problem, every_block: Choice) -> list[Choice]:
        """Return choices that checkpoint only some blocks.

        Their effects are interpolated from the effect of checkpointing every block.
        """
        found = list[Choice]()
        if problem.setting.trace is not None:
            for some in some_blocks(problem.workload, problem.setting.trace):
                for surrogate in self.surrogates.values():
                    surrogate.interpolate(some.choice, every_block, some.bytes_share, some.seconds_share)
                found.append(some.choice)
        return found

    def combinations(self) -> list[Combination]:
        """Return every combination of choices with a learned or supposed effect, with its possible micro-batches."""
        if self._combinations_of != self.learned:
            self._combinations_of = dict(self.learned)
            self._combinations = combinations_of(self._available, self.learned, self._required, self._allows)
        return self._combinations

    def telling_combinations(self) -> list[Combination]:
        """Return combinations with at most one choice that is only guessed, so that a trace reveals its effect."""
        return [
            combination
            for combination in self.combinations()
            if len(self.only_guessed.intersection(combination.choices)) <= 1
        ]

    def learned_combinations(self) -> list[Combination]:
        """Return the combinations in which the effects of all choices are learned from traces."""
        return [combination for combination in self.combinations() if self.only_guessed.isdisjoint(combination.choices)]

    def guesses(self, combinations: Sequence[Combination]) -> Guesses:
        """Return the table of memory needs and step times for combinations."""
        return guesses_of(combinations, self.surrogates, self.evaluations.values())

    def best_guess(self, combinations: Sequence[Combination], limit_bytes: int) -> Choices | None:
        """Return the best choices that are guessed to fit with headroom, or faster choices that may just fit.

        Returns ``None`` if no combination may fit.
        """
        if not combinations:
            return None
        guesses = self.guesses(combinations)
        may_fit = np.flatnonzero((guesses.needs <= limit_bytes) & guesses.possible)
        headroom_bytes = np.where(guesses.traced, 0, _GUESSES_OFF * limit_bytes)[may_fit]
        fitting, seconds = may_fit[guesses.needs[may_fit] + headroom_bytes <= limit_bytes], guesses.seconds
        best = guesses.best_of(fitting)
        if best is not None and best not in self.evaluations:
            return best
        if best is None or seconds[may_fit].min() < (1 - SAME_SECONDS) * self.evaluations[best].seconds:
            return guesses.best_of(may_fit)
        return best
