"""Prediction of the traces that a search needs next, so that idle cores can begin them.

A copy of the search uses guesses in place of evaluations, and stops at a combination that was not evaluated. A wrong
guess costs the time of an idle core. It cannot change the plan, because the search itself never sees these guesses.
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
"""Called with combinations that are certain to be traced in this order."""

Likely = tuple[Choices, bool]
"""A combination that may be traced, and whether it is traced at full length."""

Suppose = Callable[[Iterable[Likely]], None]
"""Called with combinations that may be traced next, likeliest first. It consumes only those that it can begin."""


class Untraced(Exception):
    """A copy of the search requests a combination that was not traced."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.choices = choices


def not_traced(choices: Choices) -> Evaluation:
    """Raise `Untraced` instead of tracing a combination."""
    raise Untraced(choices)


def asked_in_turn(
    go_on: Callable[[], object], guess: Callable[[Choices], None], at_length: Mapping[Choices, Evaluation]
) -> Iterator[Likely]:
    """Yield the combinations that a search requests, in order. After each, a guess replaces the result of the trace.

    Args:
        go_on: runs the copied search again, until `not_traced` raises or the search ends.
        guess: stores a guess as the result of a combination.
        at_length: evaluations of the combinations that the search requested at full length; the search adds to them.
    """
    asked: Choices | None = ()
    while asked is not None:
        num_before = len(at_length)  # these combinations are requested again
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
    """Return the expected evaluation of choices.

    The peak and the step time are guessed. The other fields are from the most similar trace.
    """
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
