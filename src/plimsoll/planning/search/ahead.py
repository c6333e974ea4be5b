"""Which traces a search will probably need next, so that idle cores can begin them.

A copy of the search finds out: it takes guesses for results, and stops where it needs a mix that it has no result of. A
wrong guess costs the time of an idle core and changes no plan, since the search itself never sees guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from plimsoll.planning.search.evaluation import Look
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import MICRO_BATCH, Duration, without_micro_batch
from plimsoll.records.prediction import Estimate
from plimsoll.techniques import Choices

Expect = Callable[[Sequence[Choices]], None]
"""Told of several mixes that will be traced in this order, whatever each of them says."""

Likely = tuple[Choices, bool]
"""A mix that may be traced, and whether it is at full length."""

Suppose = Callable[[Iterable[Likely]], None]
"""Told of what may be traced next, the likeliest first; it takes as many as can be begun."""


class Untraced(Exception):
    """A copy of the search needs a mix that was not traced."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.choices = choices


def not_traced(choices: Choices) -> Look:
    """Refuse to trace a mix."""
    raise Untraced(choices)


def asked_in_turn(
    go_on: Callable[[], object], guess: Callable[[Choices], None], at_length: Mapping[Choices, Look]
) -> Iterator[Likely]:  # fmt: skip
    """Yield what a search asks for, each after what was asked for before is taken to be as guessed.

    Args:
        go_on: goes on from the beginning, as far as `not_traced`.
        guess: takes a mix to be as guessed.
        at_length: what was asked for at full length.
    """
    asked: Choices | None = ()
    while asked is not None:
        num_before = len(at_length)  # these are asked for again
        try:
            go_on()
            asked = None
        except Untraced as untraced:
            asked = untraced.choices
        yield from ((choices, True) for choices in islice(tuple(at_length), num_before, None))
        if asked is not None:
            yield asked, False
            guess(asked)


def as_guessed(choices: Choices, surrogate: Surrogate, looks: Iterable[Look]) -> Look:
    """Return what a trace of choices may say, but for peak and time that of what is most like it."""
    mix = without_micro_batch(choices)
    micro_batch = next(int(one.options["samples"]) for one in choices if one.technique == MICRO_BATCH)
    need, seconds = surrogate.guess([mix], np.zeros(1, dtype=int), np.asarray([micro_batch]))
    need_bytes, likely_seconds = max(int(need[0]), 1), max(float(seconds[0]), 0.0)
    alike = min(looks, key=lambda look: (len(set(mix) ^ set(look.mix)), abs(micro_batch - look.micro_batch)))
    return replace(
        alike,
        choices=choices,
        micro_batch=micro_batch,
        peak=Estimate(likely_bytes=need_bytes, low_bytes=need_bytes, high_bytes=need_bytes),
        fits=True,
        step_time=Duration(likely_seconds=likely_seconds, low_seconds=likely_seconds, high_seconds=likely_seconds),
    )
