"""``plimsoll watch``: what a run, a process or this machine uses of memory against its limits, while it goes on."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plimsoll.records.watch import WatchSample

_NUM_SHOWN = 30  # samples that the live view looks back on


def watch(  # noqa: PLR0917 -- typer calls it by name
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory; left out with --pid, and for this machine.")
    ] = None,
    pid: Annotated[int | None, typer.Option("--pid", min=1, help="A process; what it started is watched too.")] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, max=86400.0, help="Seconds between samples.")] = 2.0,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Stop after so many samples.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help="Write every sample to this new file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record at the end, no lines.")] = False,
) -> None:
    """Watch memory against its limits. Ends with 1 if a limit was near or memory ran out, after Ctrl-C with 130.

    \b
    Examples:
      plimsoll watch runs/a
      plimsoll watch --pid 4711 --every 1 --record watch.jsonl
      plimsoll watch
      plimsoll watch --pid 4711 --samples 10 --json
      plimsoll report watch.jsonl -o watch.html
      plimsoll explain watch.jsonl
    """
    from plimsoll.cli.output import failures_shown, show
    from plimsoll.diagnose.watch import watch_of
    from plimsoll.errors import InputError
    from plimsoll.records.watch import append, begin

    with failures_shown() if as_json else nullcontext():
        if run is not None and pid is not None:
            raise InputError(f"{run} and --pid {pid} are two things to watch: give one of them")
        seen = _Seen(keeps_samples=as_json)
        with watch_of(run, pid) as look:
            head = look.head()
            if record is not None:
                begin(record, head)
            with _shown(head.subject, as_json) as show_sample, seen.until_interrupted():
                for sample in look.samples(every, samples):
                    with _undisturbed():
                        if record is not None:
                            append(record, sample)
                        seen.note(sample)
                    show_sample(sample)
            end = look.end()
        if record is not None:
            append(record, end)
        if as_json:
            show(head.model_copy(update={"samples": tuple(seen.samples), "end": end}).to_json())
    print(f"{head.subject}: {end.text}", file=sys.stderr)
    if seen.interrupted_by is not None:
        raise typer.Exit(128 + seen.interrupted_by)
    if seen.has_warned or end.how == "out_of_memory":
        raise typer.Exit(1)


@dataclass
class _Seen:
    """What a watch came to; all samples are kept only to be printed, they would fill memory."""

    keeps_samples: bool
    samples: list[WatchSample] = field(default_factory=list)
    has_warned: bool = False
    interrupted_by: int | None = None

    def note(self, sample: WatchSample) -> None:
        self.has_warned |= bool(sample.warnings)
        if self.keeps_samples:
            self.samples.append(sample)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the block, and nothing else."""

        def stop(number: int, _: FrameType | None) -> None:
            self.interrupted_by = number
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted_by = self.interrupted_by or signal.SIGINT
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


@contextmanager
def _shown(subject: str, as_json: bool) -> Iterator[Callable[[WatchSample], None]]:
    """Yield what shows a sample: a live view on a terminal, else a line, with ``--json`` nothing."""
    from plimsoll.cli.output import show
    from plimsoll.report.watch_view import sample_line

    if sys.stderr.isatty() and (as_json or sys.stdout.isatty()):
        with _live(subject) as update:
            yield update
    elif as_json:
        yield lambda sample: None
    else:
        yield lambda sample: show(sample_line(sample))


@contextmanager
def _live(subject: str) -> Iterator[Callable[[WatchSample], None]]:
    from rich.live import Live

    from plimsoll.report.console import StandardError
    from plimsoll.report.watch_view import watch_panel

    history: deque[WatchSample] = deque(maxlen=_NUM_SHOWN)
    with Live(console=StandardError(), auto_refresh=False) as live:

        def update(sample: WatchSample) -> None:
            history.append(sample)
            live.update(watch_panel(subject, tuple(history)), refresh=True)

        yield update
