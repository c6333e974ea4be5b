"""The candidates of a plan, and the order in which configurations can follow each other when memory runs out.

Predicted step times have an error margin. Plans within this margin of the fastest are candidates. If the device is
present, candidates are timed (`plimsoll.planning.measured_choice`), and the fastest becomes the plan. A few candidates
that differ in micro-batch, checkpointing or heap are worth more than many similar candidates. The range of a predicted
peak is wide if a heap keeps freed memory. A combination that probably fits is therefore a candidate too, and becomes
the plan only if its measured peak fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.plan import Choice, Configuration
from plimsoll.techniques import Choices, technique_of

MOST_CANDIDATES = 4
"""Maximum number of candidates, including the chosen plan. A trial of each takes a few steps."""

FALLS_SHARE = 0.95
"""Relative to the need of the previous configuration: a fallback must need less than this share."""


def can_follow(before: Choices, combination: Choices) -> bool:
    """Return whether a run can switch from one combination to another.

    Techniques that change the trained model must be the same. Techniques that moved states or parameters must stay,
    because undoing them takes memory; further such techniques may be added.
    """
    moved = [tuple(one for one in both if _takes_memory_to_undo(one)) for both in (before, combination)]
    return _for_the_run(before) == _for_the_run(combination) and moved[1][: len(moved[0])] == moved[0]


def candidates_beside(
    chosen: Evaluation, fallbacks: Sequence[Evaluation], evaluations: Sequence[Evaluation], limit_bytes: int
) -> tuple[Evaluation, ...]:
    """Return the candidates for a trial in addition to the plan itself, fastest first by prediction.

    Args:
        chosen: the evaluation of the plan.
        fallbacks: fallbacks of the plan. At least one of them must be able to follow a candidate, too.
        evaluations: the evaluations of traced combinations that can be a plan.
        limit_bytes: upper bound for the memory that a plan may need.
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
    """Return configurations in the order in which a run can fall back when memory runs out.

    Args:
        first: the configuration in use.
        fallbacks: configurations in order of falling need. A fallback is left out if it cannot follow its predecessor.
        others: further configurations, inserted in the order where they need less than their predecessor.
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
    """Return the budget in bytes that a configuration needs; 0 without a prediction, as for single samples."""
    return configuration.peak.high_bytes if configuration.peak is not None else 0


def _for_the_run(combination: Choices) -> Choices:
    return tuple(choice for choice in combination if technique_of(choice.technique).is_for_the_run)


def _takes_memory_to_undo(choice: Choice) -> bool:
    """Return whether undoing a technique takes memory, because it moved states or parameters."""
    return not technique_of(choice.technique).moves.isdisjoint({"states", "parameters"})


def _kind_of(evaluation: Evaluation) -> tuple[str, ...]:
    return tuple(str(one) for one in evaluation.choices if technique_of(one.technique).decides_time)
