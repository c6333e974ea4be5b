"""Reasons why evaluated combinations are not the plan. They claim only differences that predictions can resolve."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.planning.search.choices import Problem
from plimsoll.planning.search.evaluation import Evaluation
from plimsoll.records.plan import MICRO_BATCH, Numerics, Rejected
from plimsoll.records.units import format_bytes
from plimsoll.techniques import TECHNIQUES

SAME_SECONDS = 0.02
"""Share of a step time: the time model cannot tell which of two plans is faster if they differ by less."""


def rejected(evaluation: Evaluation, chosen: Evaluation, problem: Problem) -> Rejected:
    """Return the record of a combination with the reason why ``chosen`` is better."""
    is_compared, need = False, format_bytes(evaluation.need_bytes)
    line_bytes = problem.limit_bytes + problem.margin_bytes
    if not evaluation.fits or evaluation.need_bytes > line_bytes:
        line, excess_bytes = format_bytes(line_bytes), evaluation.need_bytes - line_bytes
        more = f"{format_bytes(excess_bytes)} more" if need == line and excess_bytes > 0 else "more"
        reason = f"needs up to {need}, {more} than {line}"
    elif evaluation.need_bytes > problem.limit_bytes:
        reason = f"needs up to {need}, too close to {format_bytes(line_bytes)} for a short dry run to tell"
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
    """Return the record with the reason "not tried", for use after a trial replaced the plan by a candidate."""
    if not one.is_compared or one.step_time is None:
        return one
    reason = f"not tried: {_written(one.step_time.likely_seconds)} a step predicted"
    return one.model_copy(update={"reason": reason, "is_compared": False})


def _pace(seconds: float, chosen_seconds: float) -> str:
    """Compare a step time with the plan's in words, without claiming a difference that predictions cannot resolve."""
    text, chosen_text = _written(seconds), _written(chosen_seconds)
    if seconds > (1 + SAME_SECONDS) * chosen_seconds:
        return f"slower: {text} a step against {chosen_text}"
    if text == chosen_text:
        return f"no faster: the same {text} a step"
    return f"no faster: {text} a step against {chosen_text}, less than the time model can resolve ({SAME_SECONDS:.0%})"


def _written(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def told_of(names: Iterable[str], is_whole: bool) -> tuple[dict[str, str], dict[str, Numerics]]:
    """Return the descriptions and the numerics of techniques, by name; ``is_whole`` if the batch is one micro-batch."""
    about = {name: TECHNIQUES[name].summary for name in sorted(names)}
    numerics = {name: TECHNIQUES[name].numerics for name in sorted(names)}
    if is_whole:
        about[MICRO_BATCH], numerics[MICRO_BATCH] = "the whole batch in one pass", "bitwise"
    return about, numerics
