"""``plimsoll watch``: what a run, a process or this machine uses of memory against its limits, while it goes on."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer


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
    from plimsoll.diagnose.follow import follow
    from plimsoll.diagnose.watch import watch_of
    from plimsoll.errors import InputError
    from plimsoll.records.watch import append, begin
    from plimsoll.report.watch_view import shown_samples

    with failures_shown() if as_json else nullcontext():
        if run is not None and pid is not None:
            raise InputError(f"{run} and --pid {pid} are two things to watch: give one of them")
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
