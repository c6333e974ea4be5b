"""``plimsoll watch``: what a running process uses of host memory against its limits, a line per sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plimsoll.records.watch import WatchSample


def watch(
    pid: Annotated[int, typer.Option("--pid", min=1, help="The process; what it started is watched too.")],
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between samples.")] = 2.0,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Stop after so many samples.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help="Append every sample to this new file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record at the end, no lines.")] = False,
) -> None:
    """Watch the host memory of a process against its limits. Ends with 1 if a limit was near, else with 0.

    \b
    Examples:
      plimsoll watch --pid 4711
      plimsoll watch --pid 4711 --every 1 --record watch.jsonl
      plimsoll watch --pid 4711 --samples 10 --json
    """
    from plimsoll.cli.answer import answering
    from plimsoll.cli.output import show
    from plimsoll.errors import OutputError
    from plimsoll.records.watch import WatchRecord, append
    from plimsoll.run.watch import watch as look

    seen: list[WatchSample] = []
    has_warned = False
    with answering("the watch", as_json):
        if record is not None and record.exists():
            raise OutputError(f"{record} exists already and is not added to: give another --record")
        for sample in look(pid, every, samples):
            has_warned |= any(line.seconds_left is not None for line in sample.lines)
            if record is not None:
                append(record, sample)
            if as_json:
                seen.append(sample)
            else:
                show(_text_of(sample))
        if as_json:
            show(WatchRecord(samples=tuple(seen)).to_json())
    if has_warned:
        raise typer.Exit(1)


def _text_of(sample: WatchSample) -> str:
    from plimsoll.records.units import format_bytes

    private_bytes = sum(use.private_bytes for use in sample.processes)
    parts = [f"{sample.seconds:.0f} s", f"{len(sample.processes)} processes", f"private {format_bytes(private_bytes)}"]
    for line in sample.lines:
        parts.append(f"{line.name} {format_bytes(line.used_bytes)} of {format_bytes(line.limit_bytes)}")
        if line.seconds_left is not None:
            parts.append(f"WARNING: reached in about {line.seconds_left:.0f} s")
    return " · ".join(parts)
