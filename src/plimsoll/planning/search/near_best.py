"""Which plans are about as fast as the chosen one, and what can follow which when memory runs out.

The model of time has a spread. Plans within it of the fastest are its candidates: where the device is here they are run
(`plimsoll.planning.measured_choice`), and the fastest is taken. A few that are unlike each other in what decides the
time (micro-batch, checkpointing, heap) are worth more than many that are nearly alike. The range of a predicted peak is
wide where a heap keeps what is freed: what probably fits is a candidate, too, and taken only if it was measured to.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.plan import Choice, Configuration
from plimsoll.techniques import Choices, technique_of

MOST_CANDIDATES = 4
"""The chosen plan among them: a trial of each takes a few steps."""

FALLS_SHARE = 0.95
"""Of what is before it: what needs more is no fallback."""


def can_follow(before: Choices, combination: Choices) -> bool:
    """Whether a combination can come after another in a run: it keeps what changes the training and moves states."""
    moved = [tuple(one for one in both if _takes_memory_to_undo(one)) for both in (before, combination)]
    return _for_the_run(before) == _for_the_run(combination) and moved[1][: len(moved[0])] == moved[0]


def candidates_beside(
    chosen: Evaluation, fallbacks: Sequence[Evaluation], evaluations: Sequence[Evaluation], limit_bytes: int
) -> tuple[Evaluation, ...]:
    """Return the other candidates, the fastest first by what the model says.

    Args:
        chosen: the plan.
        fallbacks: those of the plan. They have to do for a candidate as well: one of them must be able to follow it.
        evaluations: what was traced and can be a plan.
        limit_bytes: what a plan may need.
    """
    near = [
        evaluation
        for evaluation in evaluations
        if evaluation is not chosen
        and evaluation.fits
        and evaluation.peak.likely_bytes <= limit_bytes
        and evaluation.seconds <= chosen.step_time.high_seconds
        and _for_the_run(evaluation.combination) == _for_the_run(chosen.combination)
        and (not fallbacks or any(_can_fall(evaluation.configuration(), one.configuration()) for one in fallbacks))
    ]
    near.sort(key=lambda evaluation: (evaluation.seconds, str(evaluation.choices)))
    unlike = dict[tuple[str, ...], Evaluation]()
    for evaluation in near:
        if _kind_of(evaluation) != _kind_of(chosen) or evaluation.seconds < chosen.seconds:
            unlike.setdefault(_kind_of(evaluation), evaluation)
    first = list(unlike.values())
    taken = [*first, *(evaluation for evaluation in near if evaluation not in first)][: MOST_CANDIDATES - 1]
    return tuple(evaluation for evaluation in near if evaluation in taken)


def in_falling_order(
    first: Configuration, fallbacks: Sequence[Configuration], others: Sequence[Configuration] = ()
) -> tuple[Configuration, ...]:
    """Put the fallbacks in order that a run can go down when memory runs out.

    Args:
        first: what is in force.
        fallbacks: what needs less, in order; what cannot follow what is before it is left out.
        others: further ones, which come in between where they need less than what is before them.
    """
    found = [first]
    for configuration in fallbacks:
        if _can_fall(found[-1], configuration):
            found.append(configuration)
    for configuration in others:
        place = next(
            (number for number, one in enumerate(found) if _need_of(one) < _need_of(configuration)), len(found)
        )
        after = found[place : place + 1]
        is_less = _need_of(configuration) < FALLS_SHARE * _need_of(found[place - 1])
        if (
            place
            and is_less
            and _can_fall(found[place - 1], configuration)
            and all(_can_fall(configuration, one) for one in after)
        ):
            found.insert(place, configuration)
    return tuple(found)


def _can_fall(before: Configuration, after: Configuration) -> bool:
    is_smaller = after.others != before.others or after.micro_batch < before.micro_batch
    return is_smaller and _need_of(after) < _need_of(before) and can_follow(before.others, after.others)


def _need_of(configuration: Configuration) -> float:
    """The budget it is safe in; of what nothing was predicted for, such as single samples, nothing."""
    return configuration.peak.high_bytes if configuration.peak is not None else 0


def _for_the_run(combination: Choices) -> Choices:
    return tuple(choice for choice in combination if technique_of(choice.technique).is_for_the_run)


def _takes_memory_to_undo(choice: Choice) -> bool:
    """Whether what has moved would have to come back, in the crisis."""
    return not technique_of(choice.technique).moves.isdisjoint({"states", "parameters"})


def _kind_of(evaluation: Evaluation) -> tuple[str, ...]:
    return tuple(str(one) for one in evaluation.choices if technique_of(one.technique).decides_time)
