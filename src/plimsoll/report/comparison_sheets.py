"""Sheets and sentences of two runs side by side, shared by the terminal and the HTML page.

A change is the value of the second run minus the value of the first run. It has no percentage if the value of the first
run is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from plimsoll.records.run_comparison import RunComparison, RunSide
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.prediction_sheets import short_path
from plimsoll.report.sheets import Column, Sheet, columns_of, format_loss, format_speed

_MOST_PLACES = 15  # short enough to read; the record has all differences

Number = int | float | None


def labels(comparison: RunComparison) -> tuple[str, str]:
    """Return the names of the runs, marked ``(first)`` and ``(second)`` if they are equal."""
    names = comparison.first.name, comparison.second.name
    return names if names[0] != names[1] else (f"{names[0]} (first)", f"{names[1]} (second)")


def headline(comparison: RunComparison) -> str:
    """Return a sentence on the change in peak and step time from the first run to the second."""
    first, second = comparison.first, comparison.second
    one, other = labels(comparison)
    said = []
    if first.peak_bytes is not None and second.peak_bytes is not None:
        said.append(f"peak {_change(first.peak_bytes, second.peak_bytes, format_bytes)}")
    if first.step_seconds is not None and second.step_seconds is not None:
        said.append(f"step time {_change(first.step_seconds, second.step_seconds, format_seconds)}")
    return f"{other} compared with {one}: {', '.join(said) or 'no value was measured in both'}."


def job_sentence(comparison: RunComparison) -> str:
    """Return a sentence on whether both runs have the same job."""
    num = len(comparison.job)
    if not num:
        return "Both runs have the same job."
    return f"The jobs differ in {num} field{'s' * (num != 1)}, which may explain the differences."


def number_sheet(comparison: RunComparison) -> Sheet:
    """Return the measurements of both runs and their changes."""
    first, second = comparison.first, comparison.second

    def row(title: str, value: Callable[[RunSide], Number], write: Callable[[Any], str]) -> tuple[str, ...]:
        one, other = value(first), value(second)
        change = "" if one is None or other is None else _change(one, other, write)
        return title, *("none" if number is None else write(number) for number in (one, other)), change

    def words(title: str, value: Callable[[RunSide], str]) -> tuple[str, ...]:
        return title, value(first), value(second), "" if value(first) == value(second) else "differs"

    rows = (
        words("Status", lambda side: side.status),
        words("Device", lambda side: side.device),
        row("Peak memory", lambda side: side.peak_bytes, format_bytes),
        row("Budget", lambda side: side.limit_bytes, format_bytes),
        row("Predicted peak", lambda side: side.predicted_peak_bytes, format_bytes),
        row("Step time", lambda side: side.step_seconds, format_seconds),
        *_speed_rows(comparison, row, words),
        row("Steps", lambda side: len(side.steps), "{:,}".format),
        row("First loss", lambda side: _loss(side, 0), format_loss),
        row("Last loss", lambda side: _loss(side, -1), format_loss),
        row("Validation loss", lambda side: side.validation_loss, format_loss),
        words("Plan at start", lambda side: " + ".join(side.choices) or "no technique"),
        words("Plan at end", lambda side: " + ".join(side.last_choices) or "no technique"),
        row("OOM events", lambda side: side.num_oom_events, str),
        row("OOM events survived", lambda side: side.num_oom_survived, str),
        row("Processes killed", lambda side: side.num_deaths, str),
    )
    one, other = labels(comparison)
    return Sheet("Side by side", (Column("Property"), Column(one), Column(other), Column("Change")), rows)


def _speed_rows(
    comparison: RunComparison, row: Callable[..., tuple[str, ...]], words: Callable[..., tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the throughput row, without a change if one run counts tokens and the other samples."""
    unit = comparison.first.unit
    if unit == comparison.second.unit:
        return [row("Throughput", lambda side: side.units_per_second, lambda speed: format_speed(speed, unit))]
    return [words("Throughput", lambda side: format_speed(side.units_per_second, side.unit))]


def job_sheet(comparison: RunComparison) -> Sheet:
    """List the fields of the jobs that differ."""
    one, other = labels(comparison)
    rows = tuple(
        (found.field, *(_written(found.field, value) for value in (found.first, found.second)))
        for found in comparison.job
    )
    return Sheet("Differences in job.yaml", (Column("Field"), Column(one), Column(other)), rows)


def category_sheet(comparison: RunComparison) -> Sheet:
    """List the predicted memory at the peak by category, largest change first."""
    first, second = comparison.first.parts, comparison.second.parts
    if not first or not second:
        return Sheet("At the peak, by category (predicted)", (), ())
    changes = {name: second.get(name, 0) - first.get(name, 0) for name in {**first, **second}}
    rows = tuple(
        (name, *_sizes(first.get(name, 0), second.get(name, 0)))
        for name in sorted(changes, key=lambda name: (-abs(changes[name]), name))
        if first.get(name) or second.get(name)
    )
    return Sheet("At the peak, by category (predicted)", (Column("Used for"), *_both(comparison)), rows)


def place_sheet(comparison: RunComparison) -> Sheet:
    """List the differences at the predicted peak by module and source line, largest change first.

    Each prediction lists only its largest allocations, so "not listed" does not mean zero bytes.
    """
    one = {(place.category, place.module, place.line): place.num_bytes for place in comparison.first.places}
    other = {(place.category, place.module, place.line): place.num_bytes for place in comparison.second.places}
    changes = {key: other.get(key, 0) - one.get(key, 0) for key in {**one, **other}} if one and other else {}
    differing = sorted((key for key in changes if changes[key]), key=lambda key: (-abs(changes[key]), key))
    rows = tuple((*_place_words(*key), *_listed(one.get(key), other.get(key))) for key in differing[:_MOST_PLACES])
    left = f", {len(rows)} of {len(differing):,}" if len(rows) < len(differing) else ""
    titles = columns_of("Used for", "Module", "Source line")
    return Sheet(f"Largest differences by module and line (predicted){left}", (*titles, *_both(comparison)), rows)


def sheets_of(comparison: RunComparison) -> tuple[Sheet, ...]:
    """Return every table, in the order of the page."""
    return number_sheet(comparison), job_sheet(comparison), category_sheet(comparison), place_sheet(comparison)


def _both(comparison: RunComparison) -> tuple[Column, ...]:
    one, other = labels(comparison)
    return Column(one, True), Column(other, True), Column("Change", True)


def _place_words(category: str, module: str, line: str) -> tuple[str, str, str]:
    return category, module or "unknown", short_path(line) or "unknown"


def _sizes(one: int, other: int) -> tuple[str, str, str]:
    return format_bytes(one), format_bytes(other), _change(one, other, format_bytes)


def _listed(one: int | None, other: int | None) -> tuple[str, str, str]:
    if one is not None and other is not None:
        return _sizes(one, other)
    return *("not listed" if size is None else format_bytes(size) for size in (one, other)), ""  # type: ignore[return-value]


def _change(one: float, other: float, write: Callable[[Any], str]) -> str:
    """Format a change with its sign and percentage: ``+1.0 MiB (+10 %)``."""
    change = other - one
    if not change or not math.isfinite(change):
        return "same" if one == other else ""
    percent = f"{100 * change / abs(one):+.1f}" if one else "+0.0"
    share = (
        "" if float(percent) == 0 else f" ({percent}\u00a0%)"
    )  # a no-break space: no line break before the percent sign
    return f"{'+' if change > 0 else '-'}{write(abs(change))}{share}"


def _loss(side: RunSide, row: int) -> float | None:
    return side.losses[row] if side.losses else None


def _written(field: str, value: object) -> str:
    if value is None:
        return "not given"
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
