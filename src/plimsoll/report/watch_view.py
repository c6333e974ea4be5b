"""Live view of ``plimsoll watch``: a panel in the terminal, or one line per sample in a pipe.

Every function but `shown_samples` is pure: it returns a renderable or a text. The layout suits 80 columns. Warnings are
written in words, not only in colour.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plimsoll.records.units import format_bytes, format_seconds
from plimsoll.records.watch import Line, ProcessUse, RunProgress, WatchSample
from plimsoll.report.console import StandardError
from plimsoll.report.sheets import format_loss, format_speed

_BLOCKS = "▁▂▃▄▅▆▇█"
_NEAR_SHARE = 0.95  # share of a limit from which its bar is red
_NUM_HISTORY = 20
LEAST_RANGE_SHARE = 0.02  # share of a limit: a sparkline covers at least this range
_MOST_PROCESSES = 10
_NUM_SHOWN = 30  # samples that the live view keeps


def sample_line(sample: WatchSample) -> str:
    """Return a sample in one line: memory, the use of each limit, and the progress of the run."""
    num = len(sample.processes)
    parts = [
        format_seconds(sample.seconds) if sample.seconds >= 1 else "0 s",
        f"{num} process{'es' * (num != 1)}",
        f"private {format_bytes(sample.private_bytes)}",
    ]
    if sample.run is not None:
        parts.append(run_text(sample.run))
    for line in sample.lines:
        parts.append(f"{line.name} {format_bytes(line.used_bytes)} of {format_bytes(line.limit_bytes)}")
        if line.seconds_left is not None:
            parts.append(_warning(line))
    if sample.num_kills:
        parts.append(kill_text(sample.num_kills))
    return " · ".join(parts)


def watch_panel(subject: str, history: Sequence[WatchSample]) -> Panel:
    """Return the live panel of ``plimsoll watch``.

    Args:
        subject: the name of the watched process or run.
        history: the last samples, newest last; at least one.
    """
    now = history[-1]
    shown: list[RenderableType] = []
    if now.run is not None:
        shown.append(Text(run_text(now.run)))
    shown += [_limits(history), *(Text(f"{line.name}: {_warning(line)}", "red") for line in now.warnings)]
    if now.num_kills:
        shown.append(Text(kill_text(now.num_kills), "red"))
    shown.append(_processes(now))
    if now.run is not None and now.run.predicted_parts:
        shown.append(Text(parts_text(now.run.predicted_parts), "dim"))
    title = Text.assemble((subject, "bold"), f", {format_seconds(now.seconds)}")
    style = "red" if now.warnings else "none"
    return Panel(Group(*shown), title=title, title_align="left", box=box.ROUNDED, border_style=style)


def run_text(run: RunProgress) -> str:
    """Return the progress of a run: step, loss, speed, out-of-memory errors and killed processes."""
    of = "" if run.num_steps is None else f" of {run.num_steps:,}"
    parts = [
        run.status if run.status != "running" else "",
        f"step {run.step:,}{of}" if run.status != "preparing" else "",
    ]
    if run.loss is not None:
        parts.append(f"loss {format_loss(run.loss)}")
    if run.units_per_second is not None:
        parts.append(format_speed(run.units_per_second, run.unit_name))
    if run.samples_per_second is not None and run.unit_name != "samples":
        parts.append(f"{run.samples_per_second:,.1f} samples/s")
    if run.micro_batch is not None:
        parts.append(f"micro-batch {run.micro_batch:,}")
    if run.num_ooms:
        parts.append(f"{run.num_ooms} out-of-memory error{'s' * (run.num_ooms != 1)}")
    if run.num_deaths:
        parts.append(f"killed {run.num_deaths} time{'s' * (run.num_deaths != 1)}")
    return ", ".join(filter(None, parts))


def parts_text(parts: dict[str, int]) -> str:
    """Return the predicted parts of the peak, largest category first."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    return f"Predicted at the peak: {words}"


def kill_text(num_kills: int) -> str:
    """Return a clause on how many processes the kernel has killed for lack of memory since the watch began."""
    times = "a process" if num_kills == 1 else f"{num_kills:,} processes"
    return f"the kernel's OOM killer has killed {times}"


def sparkline(values: Sequence[int], least_range: int) -> str:
    """Return values as a line of blocks. The scale is from the smallest to the largest value, at least `least_range`.

    >>> sparkline([0, 50, 100], 1)
    '▁▅█'
    """
    least = min(values)
    height = max(max(values) - least, least_range, 1)
    return "".join(_BLOCKS[round((value - least) / height * (len(_BLOCKS) - 1))] for value in values)


def _limits(history: Sequence[WatchSample]) -> Table:
    """Return a table with a row per limit: a bar of its use, and a sparkline of its use in the last samples."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style="dim", ratio=3, overflow="fold")
    table.add_column(ratio=2)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for line in history[-1].lines:
        used = f"{format_bytes(line.used_bytes)} of {format_bytes(line.limit_bytes)}"
        change = sparkline(_history_of(line, history), round(LEAST_RANGE_SHARE * line.limit_bytes))
        table.add_row(Text(line.name), _bar(line), Text(used), Text(change))
    return table


def _bar(line: Line) -> ProgressBar:
    is_near = line.seconds_left is not None or line.used_bytes >= _NEAR_SHARE * line.limit_bytes
    style = "red" if is_near else "cyan"
    return ProgressBar(line.limit_bytes, max(0, line.used_bytes), complete_style=style, finished_style=style)


def _history_of(line: Line, history: Sequence[WatchSample]) -> list[int]:
    samples = history[-_NUM_HISTORY:]
    return [one.used_bytes for sample in samples for one in sample.lines if one.name == line.name]


def _processes(sample: WatchSample) -> Table:
    """Return a table of the largest processes without empty columns."""
    uses = sorted(sample.processes, key=lambda use: -use.private_bytes)[:_MOST_PROCESSES]
    titles = ["private", "file", "shared"]
    titles += ["swap"] if any(use.swap_bytes for use in uses) else []
    titles += ["GPU"] if any(use.gpu_bytes is not None for use in uses) else []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("process", justify="right")
    table.add_column("name")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for use in uses:
        cells = (
            Text(format_bytes(_bytes_of(use, title))) if _bytes_of(use, title) is not None else Text("")
            for title in titles
        )
        table.add_row(str(use.pid), Text(use.name), *cells)
    num_more = len(sample.processes) - len(uses)
    if num_more:
        table.add_row("", Text(f"and {num_more} more", "dim"))
    return table


def _bytes_of(use: ProcessUse, title: str) -> int | None:
    sizes = {
        "private": use.private_bytes,
        "file": use.file_bytes,
        "shared": use.shared_bytes,
        "swap": use.swap_bytes,
        "GPU": use.gpu_bytes,
    }
    return sizes[title]


def _warning(line: Line) -> str:
    return f"WARNING: limit reached in about {format_seconds(line.seconds_left)}"


@contextmanager
def shown_samples(
    subject: str, as_json: bool, show_line: Callable[[str], None]
) -> Iterator[Callable[[WatchSample], None]]:
    """Yield a function that shows a sample, in a live view on a terminal, otherwise as one line of text.

    Args:
        subject: the name of the watched process or run.
        as_json: whether standard output carries JSON, so that no lines are shown.
        show_line: prints one line.
    """
    if sys.stderr.isatty() and (as_json or sys.stdout.isatty()):
        with _live(subject) as update:
            yield update
    elif as_json:
        yield lambda sample: None
    else:
        yield lambda sample: show_line(sample_line(sample))


@contextmanager
def _live(subject: str) -> Iterator[Callable[[WatchSample], None]]:
    history: deque[WatchSample] = deque(maxlen=_NUM_SHOWN)
    with Live(console=StandardError(), auto_refresh=False) as live:

        def update(sample: WatchSample) -> None:
            history.append(sample)
            live.update(watch_panel(subject, tuple(history)), refresh=True)

        yield update
