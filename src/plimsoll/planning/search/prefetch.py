"""Which traces a search will probably need next, so that idle cores can begin them.

A copy of the search finds out: it takes guesses for results, and stops where it needs a combination that it has no
result of. A wrong guess costs the time of an idle core and changes no plan, since the search itself never sees guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.planning.search.surrogate import Surrogate
from plimsoll.records.plan import MICRO_BATCH, Duration, without_micro_batch
from plimsoll.records.prediction import Estimate
from plimsoll.techniques import Choices

Expect = Callable[[Sequence[Choices]], None]
"""Told of several combinations that will be traced in this order, whatever each of them says."""

Likely = tuple[Choices, bool]
"""A combination that may be traced, and whether it is at full length."""

Suppose = Callable[[Iterable[Likely]], None]
"""Told of what may be traced next, the likeliest first; it takes as many as can be begun."""


class Untraced(Exception):
    """A copy of the search needs a combination that was not traced."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.choices = choices


def not_traced(choices: Choices) -> Evaluation:
    """Refuse to trace a combination."""
    raise Untraced(choices)


def asked_in_turn(
    go_on: Callable[[], object], guess: Callable[[Choices], None], at_length: Mapping[Choices, Evaluation]
) -> Iterator[Likely]:
    """Yield what a search asks for, each after what was asked for before is taken to be as guessed.

    Args:
        go_on: goes on from the beginning, as far as `not_traced`.
        guess: takes a combination to be as guessed.
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


def as_guessed(choices: Choices, surrogate: Surrogate, evaluations: Iterable[Evaluation]) -> Evaluation:
    """Return what a trace of choices may say, but for peak and time that of what is most like it."""
    combination = without_micro_batch(choices)
    micro_batch = next(int(one.options["samples"]) for one in choices if one.technique == MICRO_BATCH)
    need, seconds = surrogate.guess([combination], np.zeros(1, dtype=int), np.asarray([micro_batch]))
    need_bytes, likely_seconds = max(int(need[0]), 1), max(float(seconds[0]), 0.0)
    alike = min(
        evaluations,
        key=lambda evaluation: (
            len(set(combination) ^ set(evaluation.combination)),
            abs(micro_batch - evaluation.micro_batch),
        ),
    )
    return replace(
        alike,
        choices=choices,
        micro_batch=micro_batch,
        peak=Estimate(likely_bytes=need_bytes, low_bytes=need_bytes, high_bytes=need_bytes),
        fits=True,
        step_time=Duration(likely_seconds=likely_seconds, low_seconds=likely_seconds, high_seconds=likely_seconds),
    )
