"""Sheets and sentences of a recording of ``plimsoll watch``, shared by the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.records.watch import Line, WatchRecord, WatchSample
from plimsoll.report.sheets import Sheet, columns_of, format_loss, format_speed
from plimsoll.report.watch_view import LEAST_RANGE_SHARE, parts_text, sparkline

_MOST_PROCESSES = 20
_NUM_BLOCKS = 10  # width of a sparkline, so that the table fits 80 columns
_MOST_ROWS = 12

T = TypeVar("T")


def sentences(record: WatchRecord) -> tuple[str, ...]:
    """Return sentences on the duration, the highest memory, the end, and the limits that were nearly reached."""
    num = len(record.samples)
    if not num:
        said = [f"No sample of {record.subject} was recorded."]
    else:
        peak = max(record.samples, key=lambda sample: sample.private_bytes)
        said = [
            f"{num:,} sample{'s' * (num != 1)} in {format_seconds(record.samples[-1].seconds)}; highest private memory "
            f"{format_bytes(peak.private_bytes)}, at {format_seconds(peak.seconds)}.",
        ]
    said.append(
        "The recording is incomplete." if record.end is None else f"{record.end.text[:1].upper()}{record.end.text[1:]}."
    )
    warned = dict.fromkeys(line.name for sample in record.samples for line in sample.warnings)
    if warned:
        said.append(f"Near its limit: {', '.join(warned)}.")
    last = record.samples[-1].run if num else None
    if last is not None and last.predicted_parts:
        said.append(f"{parts_text(last.predicted_parts)}.")
    return tuple(said)


def sheets_of(record: WatchRecord) -> tuple[Sheet, ...]:
    """Return the sheets of limits, processes, and samples over time. Some may be empty."""
    return limit_sheet(record), process_sheet(record), time_sheet(record)


def limit_sheet(record: WatchRecord) -> Sheet:
    """List every limit with its highest use."""
    columns = columns_of("Limit", "#Highest", "#Allowed", "#Share", "#Warned at", "Over time")
    rows = []
    for seen in lines_by_name(record).values():
        highest = max((line for _, line in seen), key=lambda line: line.used_bytes)
        first = next((seconds for seconds, line in seen if line.seconds_left is not None), None)
        rows.append(
            (
                highest.name,
                format_bytes(highest.used_bytes),
                format_bytes(highest.limit_bytes),
                f"{highest.used_share:.0%}",
                "" if first is None else format_seconds(first),
                _drawn([line.used_bytes for _, line in seen], highest.limit_bytes),
            )
        )
    return Sheet("Limits", columns, tuple(rows))


def process_sheet(record: WatchRecord) -> Sheet:
    """List the processes with the most private memory, each with its first, highest and last use."""
    found = sorted(record.uses_by_pid.values(), key=lambda seen: -max(use.private_bytes for _, use in seen))
    shown = found[:_MOST_PROCESSES]
    has_shared = any(use.shared_bytes for seen in shown for _, use in seen)
    shared = ["#Shared"] * has_shared
    columns = columns_of("Process", "#From", "#Until", "#First", "#Highest", "#Last", *shared, "Over time")
    rows = []
    for seen in shown:
        private = [use.private_bytes for _, use in seen]
        shared_bytes = max(use.shared_bytes for _, use in seen)
        rows.append(
            (
                f"{seen[0][1].pid} {seen[0][1].name}",
                format_seconds(seen[0][0]),
                format_seconds(seen[-1][0]),
                *map(format_bytes, (private[0], max(private), private[-1])),
                *([format_bytes(shared_bytes)] if has_shared else []),
                _drawn(private, max(private)),
            )
        )
    return Sheet(f"Processes, {len(rows)} of {len(found)}: private memory", columns, tuple(rows))


def time_sheet(record: WatchRecord) -> Sheet:
    """List up to twelve samples: the sample with the most memory in each of twelve equal parts of the recording."""
    has_run = any(sample.run is not None for sample in record.samples)
    columns = columns_of("#At", "#Private", "#Nearest limit", *(("#Step", "#Loss", "#Speed") if has_run else ()))
    parts = _parts(record.samples, _MOST_ROWS)
    shown = [max(part, key=lambda sample: sample.private_bytes) for part in parts]
    cells = tuple(_time_cells(sample, has_run) for sample in shown)
    return Sheet(f"Samples, {len(shown)} of {len(record.samples):,}", columns, cells)


def _time_cells(sample: WatchSample, has_run: bool) -> tuple[str, ...]:
    nearest = max((line.used_share for line in sample.lines), default=None)
    cells = (
        format_seconds(sample.seconds),
        format_bytes(sample.private_bytes),
        "" if nearest is None else f"{nearest:.0%}",
    )
    if not has_run:
        return cells
    run = sample.run
    if run is None:
        return (*cells, "", "", "")
    loss = "" if run.loss is None else format_loss(run.loss)
    return (*cells, f"{run.step:,}", loss, format_speed(run.units_per_second, run.unit_name))


def lines_by_name(record: WatchRecord) -> dict[str, list[tuple[float, Line]]]:
    """Return the use of each limit over time by name of the limit, as pairs of seconds and `Line`."""
    found: dict[str, list[tuple[float, Line]]] = {}
    for sample in record.samples:
        for line in sample.lines:
            found.setdefault(line.name, []).append((sample.seconds, line))
    return found


def _drawn(sizes: list[int], whole_bytes: int) -> str:
    """Return a sparkline of ``sizes``. Each of its few characters shows the maximum of an equal part of ``sizes``.

    ``whole_bytes`` sets the least range of the scale, so that a small change of a large size looks flat.
    """
    highest = [max(part) for part in _parts(sizes, _NUM_BLOCKS)]
    return sparkline(highest, round(LEAST_RANGE_SHARE * whole_bytes))


def _parts(values: Sequence[T], most_parts: int) -> list[Sequence[T]]:
    """Split values into up to `most_parts` non-empty parts of about equal length."""
    num_parts = min(most_parts, len(values))
    bounds = [len(values) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [values[begin:end] for begin, end in pairwise(bounds)]
