"""What a search knows: what it has looked at, what that teaches of techniques, and the mixes that there are of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from plimsoll.planning.search.ahead import as_guessed
from plimsoll.planning.search.block_options import some_blocks
from plimsoll.planning.search.combinations import Allows, Mix, mixes_of
from plimsoll.planning.search.evaluation import Look, in_heap
from plimsoll.planning.search.guesses import Guesses, guesses_of
from plimsoll.planning.search.options import Menu, Problem
from plimsoll.planning.search.reasons import SAME_SECONDS
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import Choice
from plimsoll.techniques import Choices, technique_of

_GUESSES_OFF = 0.025  # of the limit: what is guessed to need more is looked at if nothing else may fit


class Known:
    """Looks, what they teach (a surrogate for each heap), and the options of each technique that may be used.

    ``only_guessed`` are options of which no trace has told yet.
    """

    def __init__(self, menu: Menu, required: frozenset[str], allows: Allows) -> None:
        self._menu, self._required, self._allows = menu, required, allows
        self.looks: dict[Choices, Look] = {}
        self.surrogates: dict[Choice | None, Surrogate] = {}
        self.learned: dict[str, list[Choice]] = {}
        self.only_guessed: set[Choice] = set()
        self._mixes_of: dict[str, list[Choice]] | None = None
        self._mixes: list[Mix] = []

    def copied(self) -> Known:
        """Return what is known, to which something can be added by itself."""
        other = copy(self)
        other.looks, other.only_guessed = dict(self.looks), set(self.only_guessed)
        other.surrogates = {heap: surrogate.copied() for heap, surrogate in self.surrogates.items()}
        return other

    def take_guess(self, choices: Choices) -> None:
        """Take choices to be traced, and to be as they are guessed with each heap."""
        for heap, surrogate in self.surrogates.items():
            alike = in_heap(choices, heap)
            if self._allows(alike):
                self.looks[alike] = as_guessed(alike, surrogate, self.looks.values())
        self.only_guessed.difference_update(choices)

    def suppose(self, weaker: Sequence[Choice], strongest: Choice) -> Sequence[Choice]:
        """Take weaker options to do as much, in less time, until one is traced as part of a mix."""
        for choice in weaker:
            for surrogate in self.surrogates.values():
                surrogate.suppose(choice, strongest, technique_of(choice.technique).may_be_faster)
        self.only_guessed.update(weaker)
        return weaker

    def blocks(self, problem: Problem, every_block: Choice) -> list[Choice]:
        """Subsets of the blocks, guessed from what all of them do."""
        found = list[Choice]()
        if problem.setting.trace is not None:
            for some in some_blocks(problem.workload, problem.setting.trace):
                for surrogate in self.surrogates.values():
                    surrogate.interpolate(some.choice, every_block, some.bytes_share, some.seconds_share)
                found.append(some.choice)
        return found

    def mixes(self) -> list[Mix]:
        """Every mix of what was learned or guessed, with the sizes it can have."""
        if self._mixes_of != self.learned:
            self._mixes_of = dict(self.learned)
            self._mixes = mixes_of(self._menu, self.learned, self._required, self._allows)
        return self._mixes

    def telling_mixes(self) -> list[Mix]:
        """Those with at most one choice that is only guessed, about which a trace of the mix then tells."""
        return [mix for mix in self.mixes() if len(self.only_guessed.intersection(mix.choices)) <= 1]

    def learned_mixes(self) -> list[Mix]:
        """Those of what was learned."""
        return [mix for mix in self.mixes() if self.only_guessed.isdisjoint(mix.choices)]

    def guesses(self, mixes: Sequence[Mix]) -> Guesses:
        """What is traced or guessed of mixes."""
        return guesses_of(mixes, self.surrogates, self.looks.values())

    def best_guess(self, mixes: Sequence[Mix], limit_bytes: int) -> Choices | None:
        """The choices to take: what is traced or guessed to fit with room to spare, or is faster and may just fit."""
        if not mixes:
            return None
        guesses = self.guesses(mixes)
        may_fit = np.flatnonzero((guesses.needs <= limit_bytes) & guesses.possible)
        spare_bytes = np.where(guesses.traced, 0, _GUESSES_OFF * limit_bytes)[may_fit]
        fitting, seconds = may_fit[guesses.needs[may_fit] + spare_bytes <= limit_bytes], guesses.seconds
        best = guesses.best_of(fitting)
        if best is not None and best not in self.looks:
            return best
        if best is None or seconds[may_fit].min() < (1 - SAME_SECONDS) * self.looks[best].seconds:
            return guesses.best_of(may_fit)
        return best
