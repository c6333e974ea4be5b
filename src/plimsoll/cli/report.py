"""``plimsoll report``: a run directory, or a record in a file, as text, JSON or one HTML page."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run directory, also of one still going, the --out of shrink, a recorded watch, or a record.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one self-contained HTML page here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
) -> None:
    """Show what happened in a run, or what a saved record says, such as a plan.

    \b
    Examples:
      plimsoll report runs/a
      plimsoll report runs/a -o a.html
      plimsoll report runs/a --json
      plimsoll report plan.json -o plan.html
      plimsoll report small -o small.html
      plimsoll report watch.jsonl -o watch.html
    """
    from plimsoll.cli.output import failures_shown, show
    from plimsoll.errors import OutputError
    from plimsoll.records.base import write_atomically
    from plimsoll.records.run import RunRecord
    from plimsoll.records.shrink import SHRINK_RECORD
    from plimsoll.report.render import load, render

    with failures_shown() if as_json else nullcontext():
        if (run / SHRINK_RECORD).is_file():
            run /= SHRINK_RECORD
        is_record = run.is_file() or (run.suffix == ".json" and not run.is_dir())
        record = load(run) if is_record else RunRecord.from_directory(run)
        if output is None:
            show(render(record, "json" if as_json else "text"))
            return
        if output.exists() and not force:
            raise OutputError(f"{output} exists already and is not overwritten: give another -o, or --force")
        write_atomically(output, render(record, "html").encode(), "-o/--output")
        if as_json:
            show(render(record, "json"))
        else:
            show(str(output))
