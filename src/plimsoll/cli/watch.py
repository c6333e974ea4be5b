"""``plimsoll watch``: live memory use of a run, a process or this machine against its limits."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson

_WATCH = "Watch"


def watch(  # noqa: PLR0917 -- typer calls it by name
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run directory.", show_default="the whole machine"),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option("--pid", min=1, metavar="PID", help="Process, with its descendants.", rich_help_panel=_WATCH),
    ] = None,
    every: Annotated[
        float,
        typer.Option(
            "--every", min=0.1, max=86400.0, metavar="S", help="Seconds between samples.", rich_help_panel=_WATCH
        ),
    ] = 2.0,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="Stop after N samples.", rich_help_panel=_WATCH),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Write every sample to this new file.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch memory use against its limits.

    Exit code 1 if a limit was near or memory ran out, 130 after Ctrl-C.

    \b
    Examples:
      plimsoll watch runs/a
      plimsoll watch --pid 4711 --every 1 --record watch.jsonl
      plimsoll watch
    """
    from plimsoll.cli.output import failures_shown, show
    from plimsoll.diagnose.follow import follow
    from plimsoll.diagnose.watch import watch_of
    from plimsoll.errors import InputError
    from plimsoll.records.watch import append, begin
    from plimsoll.report.watch_view import shown_samples

    with failures_shown() if as_json else nullcontext():
        if run is not None and pid is not None:
            raise InputError(f"RUN ({run}) and --pid {pid} cannot be combined: give one of them")
        with watch_of(run, pid) as watching:
            head = watching.head()
            if record is not None:
                begin(record, head)
            with shown_samples(head.subject, as_json, show) as show_sample:
                seen = follow(
                    watching,
                    every_seconds=every,
                    num_samples=samples,
                    record=record,
                    show=show_sample,
                    keeps_samples=as_json,
                )
            end = watching.end()
        if record is not None:
            append(record, end)
        if as_json:
            show(head.model_copy(update={"samples": tuple(seen.samples), "end": end}).to_json())
    print(f"{head.subject}: {end.text}", file=sys.stderr)
    if seen.interrupted_by is not None:
        raise typer.Exit(128 + seen.interrupted_by)
    if seen.has_warned or end.how == "out_of_memory":
        raise typer.Exit(1)
