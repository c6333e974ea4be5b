"""``plimsoll report``: a run, a record or a comparison of two runs, as text, JSON or one HTML page."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli.options import AsJson, Force, Output

if TYPE_CHECKING:
    from plimsoll.records.base import Record


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run directory, shrink folder, watch, or record."),
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="RUN_B", help="Second run, to compare with the first.")
    ] = None,
    output: Output = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Show a run or a saved record, or compare two runs.

    The run may still be in progress.

    \b
    Examples:
      plimsoll report runs/a
      plimsoll report runs/a -o a.html
      plimsoll report runs/a runs/b -o a-and-b.html
      plimsoll report plan.json -o plan.html
      plimsoll report watch.jsonl -o watch.html
    """
    from plimsoll.cli.answer import check_output, hand_over
    from plimsoll.cli.output import failures_shown
    from plimsoll.errors import RecordError
    from plimsoll.records.run import RunRecord
    from plimsoll.records.run_comparison import RunComparison

    with failures_shown() if as_json else nullcontext():
        check_output(output, force)
        record = _record_at(run)
        if other is not None:
            second = _record_at(other)
            for place, found in ((run, record), (other, second)):
                if not isinstance(found, RunRecord):
                    raise RecordError(
                        f"{place} holds a record of kind {found.record_kind!r}, but only runs can be compared: give "
                        "two run directories, or their records from `plimsoll report --json`"
                    )
            assert isinstance(record, RunRecord)
            assert isinstance(second, RunRecord)
            record = RunComparison.of(record, second)
        hand_over(record, "", output, as_json)


def _record_at(path: Path) -> Record:
    """Return the record of a run directory, of a folder written by `plimsoll shrink`, or of a file."""
    from plimsoll.records.run import RunRecord
    from plimsoll.records.shrink import SHRINK_RECORD
    from plimsoll.report.render import load

    if (path / SHRINK_RECORD).is_file():
        path /= SHRINK_RECORD
    is_record = path.is_file() or (path.suffix == ".json" and not path.is_dir())
    return load(path) if is_record else RunRecord.from_directory(path)
