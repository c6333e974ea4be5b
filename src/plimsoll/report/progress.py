"""Progress of long work on standard error: one bar per stage, or a line where nobody knows how long it takes.

The line is there from the beginning, also while libraries are loaded: a process of its own draws it (`ticker`). Where
``--timings`` asks for it, the seconds of each stage are noted, whether they are shown or not.
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
"""What every command begins with."""


class Report(Protocol):
    """Told how far a stage is: ``done`` of ``total``."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""
        ...


@contextmanager
def spinner(quiet: bool, first: str = LOADING) -> Iterator[Callable[[str], None]]:
    """Show what is being done and for how many seconds while the block runs, and note them
    (`plimsoll.processes.timings`).

    Args:
        quiet: show nothing, as without a terminal.
        first: the first message. The part of a message before a colon is the stage.
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
    """Have another process draw a line with what is said last, and its seconds; none where it cannot be started."""
    command = [sys.executable, "-I", "-S", ticker.__file__, first]
    # Of the same process group: Ctrl-Z stops it, too. Ctrl-C is for this process, so that is blocked in it.
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
            with suppress(OSError):  # somebody may have killed it
                told.write(f"{' '.join(message.split())}\n".encode())
                told.flush()

        yield say


def _is_drawn_on() -> bool:
    console = StandardError()
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def stages(quiet: bool) -> Iterator[Report]:
    """Draw a bar of each stage that is reported while the block runs, and note its seconds; ``quiet`` draws nothing.

    Until something is reported there is the line of `spinner`.
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
