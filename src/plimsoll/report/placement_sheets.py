"""Sheets and sentences of an inference plan, shared by the terminal and the HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterable

from plimsoll.records.placement import InferencePlan, Part, Place
from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.report.plan_sheets import budget_word
from plimsoll.report.prediction_sheets import range_text
from plimsoll.report.sheets import Sheet, columns_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PLACES: tuple[Place, ...] = ("device", "host", "disk")


def verdict(plan: InferencePlan) -> str:
    """Return in one or two words whether the inference plan fits its limit."""
    if not plan.fits:
        return "impossible"
    return "fits" if plan.peak.high_bytes <= plan.limit_bytes else "probably fits"


def headline(plan: InferencePlan) -> str:
    """Return a sentence with the verdict, the peak and the expected speed."""
    if plan.smallest_budget_bytes is not None:
        return (
            f"Impossible: one row of {plan.longest_tokens:,} tokens needs at least "
            f"{format_bytes(plan.smallest_budget_bytes)} on {plan.device}: give --budget "
            f"{budget_word(plan.smallest_budget_bytes)}, or shorter rows."
        )
    return (
        f"{verdict(plan).capitalize()}: {format_bytes(plan.peak.likely_bytes)} of {format_bytes(plan.limit_bytes)} "
        f"(range {range_text(plan.peak)}) on {plan.device}, about {_rate(plan.rows_per_second)}."
    )


def sentences(plan: InferencePlan) -> tuple[str, ...]:
    """Return sentences on the memory in which weights are kept and on the bottleneck of a pass."""
    said = [_places_sentence(plan)]
    if plan.bytes_in("disk") or plan.bytes_in("host"):
        said.append(_reading_sentence(plan))
    if not plan.fits and plan.host_free_bytes is not None and plan.bytes_in("host"):
        said.append(
            f"Host memory can hold {format_bytes(plan.host_free_bytes)} of weights; the others must stay on the "
            "device, or be read from disk: give --device cpu."
        )
    return tuple(said)


def _places_sentence(plan: InferencePlan) -> str:
    num_bytes = format_bytes(plan.num_bytes)
    if plan.resident_bytes == plan.num_bytes:
        return f"All {num_bytes} of the weights stay {_where(plan, 'device')}."
    places = [f"{format_bytes(plan.bytes_in(one))} is {_where(plan, one)}" for one in _PLACES if plan.bytes_in(one)]
    return f"Of {num_bytes} of weights, {' and '.join(places)}."


def _where(plan: InferencePlan, place: Place) -> str:
    if place == "device":
        return "in memory" if plan.device_kind == "cpu" else "on the device"
    return "on disk" if place == "disk" else "in host memory"


def _reading_sentence(plan: InferencePlan) -> str:
    if not plan.read_bytes:
        return "The page cache can hold the weights on disk: only the first pass reads them; bottleneck: compute."
    source = "over the link" if plan.device_kind == "cuda" else "from disk"
    how = f" at {format_bytes(int(plan.read_bytes_per_second))}/s" if plan.read_bytes_per_second else ""
    known = {"measured": " (measured)", "table": " (from a table)", "none": ""}[plan.rate_source]
    return (
        f"Each pass reads {format_bytes(plan.read_bytes)} {source}{how}{known} in {format_seconds(plan.read_seconds)} "
        f"while it computes for {format_seconds(plan.compute_seconds)}; bottleneck: {plan.limited_by}."
    )


def key_numbers(plan: InferencePlan) -> tuple[tuple[str, str], ...]:
    """Return the key numbers of an inference plan as pairs of label and value.

    The number of pairs is even, because reports show two pairs per row.
    """
    return (
        ("Task", plan.task),
        ("Type", plan.dtype),
        ("Rows per pass", f"{plan.micro_batch:,}"),
        ("Tokens per row", _tokens(plan)),
        ("Pass time", format_seconds(plan.pass_time.likely_seconds)),
        ("Speed", _rate(plan.rows_per_second)),
        ("Limit from", plan.limit_source),
        ("Limited by", plan.limited_by),
        ("Passes traced", f"{plan.num_traces:,}"),
        ("Planned in", format_seconds(plan.plan_seconds)),
    )


def _tokens(plan: InferencePlan) -> str:
    new = f" + {plan.new_tokens:,} new" if plan.new_tokens else ""
    return f"{plan.longest_tokens:,}{new}"


def _rate(rows_per_second: float) -> str:
    return f"{rows_per_second:,.1f} rows/s" if rows_per_second >= 1 else f"{60 * rows_per_second:,.1f} rows/min"


def part_sheet(plan: InferencePlan) -> Sheet:
    """List the parts of the model and the memory that holds each. Numbered blocks in the same memory share a row."""
    groups: dict[tuple[str, Place, bool], list[Part]] = {}
    for part in plan.parts:
        groups.setdefault((_NUMBER.sub("*", part.name), part.place, part.is_streamed), []).append(part)
    rows = tuple(
        (
            parts[0].name if len(parts) == 1 else f"{pattern}: {_numbers_text(parts)}",
            _where(plan, place) + (", streamed" if is_streamed else ", read row by row" if place != "device" else ""),
            f"{len(parts):,}",
            format_bytes(sum(part.num_bytes for part in parts)),
        )
        for (pattern, place, is_streamed), parts in groups.items()
    )
    return Sheet("Parts of the model", columns_of("Part", "Place", "#Number", "#Size"), rows)


def _numbers_text(parts: Iterable[Part]) -> str:
    """Return as text the ranges of the one number in which the names of the parts differ: ``0-3, 6``."""
    numbers = [int(found[-1]) for part in parts if (found := _NUMBER.findall(part.name))]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rejected_sheet(plan: InferencePlan) -> Sheet:
    """List the rejected numbers of rows per pass, each with peak, speed and reason."""
    rows = tuple(
        (
            f"{found.micro_batch:,}",
            format_bytes(found.resident_bytes),
            format_bytes(found.peak.likely_bytes),
            _rate(found.rows_per_second),
            found.reason,
        )
        for found in plan.rejected
    )
    return Sheet("Rejected", columns_of("#Rows per pass", "#Resident", "#Peak", "#Speed", "Reason"), rows)


def assumption_sheet(plan: InferencePlan) -> Sheet:
    """List the assumptions of an inference plan."""
    return Sheet("Assumptions", columns_of("Assumption"), tuple((one.text,) for one in plan.assumptions))


def sheets_of(plan: InferencePlan) -> tuple[Sheet, ...]:
    """Return all sheets that have rows."""
    made = (part_sheet(plan), rejected_sheet(plan), assumption_sheet(plan))
    return tuple(sheet for sheet in made if sheet.rows)
