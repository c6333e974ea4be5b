"""The words and numbers of fine-tuning strategies, once: the terminal and the HTML page show the same sheets."""

from __future__ import annotations

from plimsoll.records.strategies import Strategies, Strategy
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word, seconds_range_text
from plimsoll.report.prediction_sheets import range_text
from plimsoll.report.sheets import Sheet, columns_of

GIVE_TITLE = "What to give for each, after plimsoll plan or plimsoll train and the job"
_NONE = "-"


def headline(strategies: Strategies) -> str:
    """Say in one sentence which strategies fit."""
    fitting = [strategy.name for strategy in strategies.strategies if strategy.fits]
    limit = f"{format_bytes(strategies.limit_bytes)} of {strategies.device}"
    if not fitting:
        return f"No fine-tuning strategy fits {limit}."
    return f"{len(fitting)} of {len(strategies.strategies)} fine-tuning strategies fit {limit}: {'; '.join(fitting)}."


def strategy_sheets(strategies: Strategies) -> tuple[Sheet, ...]:
    """What each strategy needs, takes and changes; what to type for it is in `give_lines`."""
    numbers = columns_of("Strategy", "Verdict", "#Peak", "#A step")
    words = columns_of("Strategy", "What it changes", "With")
    return (
        Sheet(f"Fine-tuning strategies: {strategies.subject}", numbers, tuple(map(_numbers, strategies.strategies))),
        Sheet("What each is", words, tuple(map(_words, strategies.strategies))),
    )


def give_lines(strategies: Strategies) -> tuple[str, ...]:
    """What to give to ``plimsoll plan`` or ``train`` for each strategy, to be copied: the name is a shell comment."""
    return tuple(f"{strategy.how}  # {strategy.name}" for strategy in strategies.strategies if strategy.how)


def page_sheets(strategies: Strategies) -> tuple[Sheet, ...]:
    """The same, and what to give for each strategy as a table: columns of a page are wide enough to copy from."""
    rows = tuple((strategy.name, strategy.how or _NONE) for strategy in strategies.strategies)
    return (*strategy_sheets(strategies), Sheet(GIVE_TITLE, columns_of("Strategy", "Give"), rows))


def done_line(strategy: Strategy) -> str:
    """Say in a line what was found of a strategy."""
    _, verdict, peak, step = _numbers(strategy)
    return f"{strategy.name}: {verdict}" + (f", {peak}, {step} a step" if strategy.peak is not None else "")


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
