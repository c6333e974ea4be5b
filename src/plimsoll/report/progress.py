"""Progress of long work on standard error: one bar per stage, or a line where nobody knows how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from plimsoll.records.units import format_bytes
from plimsoll.report.console import StandardError


class Report(Protocol):
    """Told how far a stage is: ``done`` of ``total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...


@contextmanager
def spinner(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, as last said, while the block runs; ``quiet``, or no terminal, shows nothing."""
    console = StandardError()
    if quiet or not console.is_terminal:
        yield lambda message: None
        return
    with console.status("") as status:
        yield lambda message: status.update(Text(message))


@contextmanager
def stages(quiet: bool) -> Iterator[Report]:
    """Draw what is reported as ``(stage, done, total)`` while the block runs; ``quiet`` draws nothing."""
    if quiet:
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=StandardError()) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


class RowReport(Protocol):
    """Told how far work on the rows of a file is: bytes of the file, and rows and tokens since it began."""

    def __call__(self, done_bytes: int, total_bytes: int, num_rows: int, num_tokens: int) -> None:
        """Show it."""
        ...


@contextmanager
def row_rates(what: str, quiet: bool) -> Iterator[tuple[RowReport, Report]]:
    """Draw a bar with rows and tokens a second and the time left while the block runs; ``quiet`` draws nothing.

    The second is for the bytes that are loaded before. Nothing is drawn before something is told.
    """
    if quiet:
        yield (lambda done_bytes, total_bytes, num_rows, num_tokens: None), (lambda stage, done, total: None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    bars = Progress(*columns, console=StandardError())
    tasks: dict[str, TaskID] = {}
    began: list[float] = []

    def update(name: str, done: int, total: int, rates: str) -> None:
        bars.start()
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=total, rates="")
        bars.update(tasks[name], completed=done, total=total, rates=rates)

    def report(done_bytes: int, total_bytes: int, num_rows: int, num_tokens: int) -> None:
        began[:] = began or [time.monotonic()]  # after the loading
        seconds = max(time.monotonic() - began[0], 1e-3)
        rates = f"{num_rows:,} rows, {num_rows / seconds:,.1f} rows/s, {num_tokens / seconds:,.0f} tokens/s"
        update(what, done_bytes, total_bytes, rates)

    try:
        yield report, lambda stage, done, total: update(stage, done, total, f"of {format_bytes(total)}")
    finally:
        if tasks:
            bars.stop()
