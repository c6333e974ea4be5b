"""The words and numbers of the ways to train, once: the terminal and the HTML page show the same sheets."""

from __future__ import annotations

from plimsoll.records.strategies import Way, Ways
from plimsoll.records.units import format_bytes
from plimsoll.report.plan_sheets import budget_word, seconds_range_text
from plimsoll.report.prediction_sheets import range_text
from plimsoll.report.sheets import Sheet, columns_of

GIVE_TITLE = "What to give for each, after plimsoll plan or plimsoll train and the job"
_NONE = "-"


def headline(ways: Ways) -> str:
    """Say in one sentence which ways there are."""
    fitting = [way.name for way in ways.ways if way.fits]
    limit = f"{format_bytes(ways.limit_bytes)} of {ways.device}"
    if not fitting:
        return f"None of the ways to train fits {limit}."
    return f"{len(fitting)} of {len(ways.ways)} ways to train fit {limit}: {'; '.join(fitting)}."


def ways_sheets(ways: Ways) -> tuple[Sheet, ...]:
    """What each way needs and takes, and what it changes; how it is had is in `give_lines`."""
    numbers = columns_of("Way", "Verdict", "#Peak", "#A step")
    words = columns_of("Way", "What it changes", "With")
    return (
        Sheet(f"Ways to train: {ways.subject}", numbers, tuple(map(_numbers, ways.ways))),
        Sheet("What each is", words, tuple(map(_words, ways.ways))),
    )


def give_lines(ways: Ways) -> tuple[str, ...]:
    """What to give to ``plimsoll plan`` or ``train`` for each way, to be copied: the name is a comment of the shell."""
    return tuple(f"{way.how}  # {way.name}" for way in ways.ways if way.how)


def page_sheets(ways: Ways) -> tuple[Sheet, ...]:
    """The same, and what to give for each way as a table: columns of a page are wide enough to copy from."""
    rows = tuple((way.name, way.how or _NONE) for way in ways.ways)
    return (*ways_sheets(ways), Sheet(GIVE_TITLE, columns_of("Way", "Give"), rows))


def done_line(way: Way) -> str:
    """Say in a line what was found of a way."""
    _, verdict, peak, step = _numbers(way)
    return f"{way.name}: {verdict}" + (f", {peak}, {step} a step" if way.peak is not None else "")


def _numbers(way: Way) -> tuple[str, ...]:
    verdict = "fits" if way.fits else "impossible" if way.impossible else _smallest(way)
    peak = _NONE if way.peak is None else range_text(way.peak)
    return (way.name, verdict, peak, _NONE if way.step_time is None else seconds_range_text(way.step_time))


def _smallest(way: Way) -> str:
    return f"needs {budget_word(way.smallest_budget_bytes or 0)}"


def _words(way: Way) -> tuple[str, ...]:
    return (way.name, way.changes, way.impossible or " ".join(map(str, way.choices)))
