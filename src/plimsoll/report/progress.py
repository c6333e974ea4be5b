"""Progress of long work on standard error: one bar per stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Report(Protocol):
    """Told how far a stage is: ``done`` of ``total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...


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
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
