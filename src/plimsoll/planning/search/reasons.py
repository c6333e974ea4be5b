"""Why a combination that was evaluated is not the plan, in words that say only what its numbers say."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.planning.search.choices import Problem
from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.plan import MICRO_BATCH, Numerics, Rejected
from plimsoll.records.units import format_bytes
from plimsoll.techniques import TECHNIQUES

SAME_SECONDS = 0.02
"""Of a step: the model of time cannot tell plans that differ by less."""


def rejected(evaluation: Evaluation, chosen: Evaluation, problem: Problem) -> Rejected:
    """Say why ``chosen`` was taken and ``evaluation`` was not."""
    is_compared, need = False, format_bytes(evaluation.need_bytes)
    line_bytes = problem.limit_bytes + problem.margin_bytes
    if not evaluation.fits or evaluation.need_bytes > line_bytes:
        line, excess_bytes = format_bytes(line_bytes), evaluation.need_bytes - line_bytes
        more = f"{format_bytes(excess_bytes)} more" if need == line and excess_bytes > 0 else "more"
        reason = f"needs up to {need}, {more} than {line}"
    elif evaluation.need_bytes > problem.limit_bytes:
        reason = f"needs up to {need}, too near {format_bytes(line_bytes)} for a first look"
    else:
        reason, is_compared = _pace(evaluation.seconds, chosen.seconds), True
    return Rejected(
        choices=evaluation.choices,
        reason=reason,
        peak=evaluation.peak,
        step_time=evaluation.step_time,
        is_compared=is_compared,
    )


def untried(one: Rejected) -> Rejected:
    """Say that it was not tried, of what was rejected beside a plan that has lost its trial."""
    if not one.is_compared or one.step_time is None:
        return one
    reason = f"not tried: {_written(one.step_time.likely_seconds)} a step predicted"
    return one.model_copy(update={"reason": reason, "is_compared": False})


def _pace(seconds: float, chosen_seconds: float) -> str:
    """How long a step takes against the chosen one's, with what cannot be told from it not told."""
    text, chosen_text = _written(seconds), _written(chosen_seconds)
    if seconds > (1 + SAME_SECONDS) * chosen_seconds:
        return f"slower: {text} a step against {chosen_text}"
    if text == chosen_text:
        return f"no faster: the same {text} a step"
    return f"no faster: {text} a step against {chosen_text} is less than the {SAME_SECONDS:.0%} that can be told apart"


def _written(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def told_of(names: Iterable[str], is_whole: bool) -> tuple[dict[str, str], dict[str, Numerics]]:
    """Say what techniques do, and what to the numbers, where the batch is one micro-batch or is cut."""
    about = {name: TECHNIQUES[name].summary for name in sorted(names)}
    numerics = {name: TECHNIQUES[name].numerics for name in sorted(names)}
    if is_whole:
        about[MICRO_BATCH], numerics[MICRO_BATCH] = "the whole batch in one pass", "bitwise"
    return about, numerics
