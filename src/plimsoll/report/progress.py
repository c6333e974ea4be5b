"""Progress of long work on standard error: one bar per stage, or a status line if the duration is unknown.

A separate process (`ticker`) draws the status line, so that it also moves while libraries are imported. With
``--timings``, the seconds of each stage are recorded even if no progress is shown.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from plimsoll.processes.timings import note
from plimsoll.records.units import format_bytes
from plimsoll.report import ticker
from plimsoll.report.console import StandardError

LOADING = "loading"
"""The first stage of every command."""


class Report(Protocol):
    """A function that shows the progress of a stage: ``done`` of ``total`` items, in any unit such as bytes."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage."""
        ...


@contextmanager
def spinner(quiet: bool, first: str = LOADING) -> Iterator[Callable[[str], None]]:
    """Show the current message and its duration while the block runs.

    `plimsoll.processes.timings` records the durations.

    Args:
        quiet: whether to hide the message. Without a terminal, it is hidden, too.
        first: the first message. The part of a message before a colon is the stage.

    Yields:
        A function that changes the message.
    """
    with ExitStack() as stack:
        say = stack.enter_context(_line(first)) if not quiet and _is_drawn_on() else None
        done, since = first, time.monotonic()

        def tell(message: str) -> None:
            nonlocal done, since
            note(done, time.monotonic() - since)
            done, since = message, time.monotonic()
            if say is not None:
                say(message)

        try:
            yield tell
        finally:
            note(done, time.monotonic() - since)


@contextmanager
def _line(first: str) -> Iterator[Callable[[str], None]]:
    """Start a process that draws the current message and its duration. If it cannot start, no message is shown."""
    command = [sys.executable, "-I", "-S", ticker.__file__, first]
    # The child stays in this process group, so that Ctrl-Z stops it too. SIGINT is blocked in the child, because only
    # this process handles Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:
        yield lambda message: None
        return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with started as process:
        assert process.stdin is not None
        told = process.stdin

        def say(message: str) -> None:
            with suppress(OSError):  # the child may have been killed
                told.write(f"{' '.join(message.split())}\n".encode())
                told.flush()

        yield say


def _is_drawn_on() -> bool:
    console = StandardError()
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def stages(quiet: bool) -> Iterator[Report]:
    """Draw a progress bar for each reported stage while the block runs, and record the duration of each stage.

    The status line of `spinner` is shown before the first report. ``quiet`` draws nothing.
    """
    bars, tasks, seconds = _bars(), dict[str, TaskID](), defaultdict[str, float](float)
    with ExitStack() as waiting, ExitStack() as drawing:
        waiting.enter_context(spinner(quiet))
        since = time.monotonic()

        def report(stage: str, done: int, total: int) -> None:
            nonlocal since
            waiting.close()
            seconds[stage] += time.monotonic() - since
            since = time.monotonic()
            if quiet:
                return
            if not tasks:
                drawing.enter_context(bars)
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        try:
            yield report
        finally:
            for stage, spent_seconds in seconds.items():
                note(stage, spent_seconds)


def _bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=StandardError())


class RowReport(Protocol):
    """A function that shows the progress in a file: bytes done and in total, and rows and tokens since the start."""

    def __call__(self, done_bytes: int, total_bytes: int, num_rows: int, num_tokens: int) -> None:
        """Show the progress in a file."""
        ...


@contextmanager
def row_rates(what: str, quiet: bool) -> Iterator[tuple[RowReport, Report]]:
    """Draw a bar with rows per second, tokens per second and remaining time while the block runs.

    Args:
        what: the label of the bar.
        quiet: whether to hide the bar.

    Yields:
        Two functions: one reports rows, the other reports the bytes of the model, which is loaded first. The first call
        of each draws a bar.
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
        began[:] = began or [time.monotonic()]  # the rate does not include loading
        seconds = max(time.monotonic() - began[0], 1e-3)
        rates = f"{num_rows:,} rows, {num_rows / seconds:,.1f} rows/s, {num_tokens / seconds:,.0f} tokens/s"
        update(what, done_bytes, total_bytes, rates)

    try:
        yield report, lambda stage, done, total: update(stage, done, total, f"of {format_bytes(total)}")
    finally:
        if tasks:
            bars.stop()
