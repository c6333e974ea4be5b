"""Sheets and sentences of fine-tuning strategies, shared by the terminal and the HTML page."""

from __future__ import annotations

from plimsoll.records.strategies import Strategies, Strategy
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word, seconds_range_text
from plimsoll.report.prediction_sheets import range_text
from plimsoll.report.sheets import Sheet, columns_of

GIVE_TITLE = "Options of each strategy, for plimsoll plan JOB and plimsoll train JOB"
_NONE = "-"


def headline(strategies: Strategies) -> str:
    """Return a sentence with the number and names of the strategies that fit."""
    fitting = [strategy.name for strategy in strategies.strategies if strategy.fits]
    limit = f"{format_bytes(strategies.limit_bytes)} of {strategies.device}"
    if not fitting:
        return f"No fine-tuning strategy fits {limit}."
    return f"{len(fitting)} of {len(strategies.strategies)} fine-tuning strategies fit {limit}: {'; '.join(fitting)}."


def strategy_sheets(strategies: Strategies) -> tuple[Sheet, ...]:
    """Return the sheets with peak, step time, changes and choices of each strategy.

    The command-line options of the strategies are in `give_lines`.
    """
    numbers = columns_of("Strategy", "Verdict", "#Peak", "#Step time")
    words = columns_of("Strategy", "Changes", "Choices")
    return (
        Sheet(f"Fine-tuning strategies: {strategies.subject}", numbers, tuple(map(_numbers, strategies.strategies))),
        Sheet("Strategies in detail", words, tuple(map(_words, strategies.strategies))),
    )


def give_lines(strategies: Strategies) -> tuple[str, ...]:
    """Return the options of each strategy, to append to ``plimsoll plan JOB``, with its name as a shell comment."""
    return tuple(f"{strategy.how}  # {strategy.name}" for strategy in strategies.strategies if strategy.how)


def page_sheets(strategies: Strategies) -> tuple[Sheet, ...]:
    """Return the sheets of the HTML page, which shows the options of each strategy as a table."""
    rows = tuple((strategy.name, strategy.how or _NONE) for strategy in strategies.strategies)
    return (*strategy_sheets(strategies), Sheet(GIVE_TITLE, columns_of("Strategy", "Options"), rows))


def done_line(strategy: Strategy) -> str:
    """Return the progress line for a strategy that has just been planned: its verdict, peak and step time."""
    _, verdict, peak, step = _numbers(strategy)
    return f"{strategy.name}: {verdict}" + (f", {peak}, {step} per step" if strategy.peak is not None else "")


def _numbers(strategy: Strategy) -> tuple[str, ...]:
    verdict = "fits" if strategy.fits else "impossible" if strategy.impossible else _smallest(strategy)
    peak = _NONE if strategy.peak is None else range_text(strategy.peak)
    return (
        strategy.name,
        verdict,
        peak,
        _NONE if strategy.step_time is None else seconds_range_text(strategy.step_time),
    )


def _smallest(strategy: Strategy) -> str:
    return f"needs {budget_word(strategy.smallest_budget_bytes or 0)}"


def _words(strategy: Strategy) -> tuple[str, ...]:
    return (strategy.name, strategy.changes, strategy.impossible or " ".join(map(str, strategy.choices)))
