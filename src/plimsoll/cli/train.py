"""``plimsoll train``: training of a job inside its budget, under a supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Changes, Forbids, Pins, Quiet, Timings

_RESUME = "Resume"


# long: one line per option
def train(  # noqa: PLR0917 -- typer calls it by name
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Job file; leave it out with --resume.", show_default=False)
    ] = None,
    budget: Annotated[str | None, options.budget("the job's")] = None,
    changes: Changes = None,
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            metavar="N",
            help="Processes that share a batch; --budget applies to each.",
            rich_help_panel="Distributed",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest checkpoint in --out.", rich_help_panel=_RESUME),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="With --resume: the checkpoint to continue from.", rich_help_panel=_RESUME),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use this plan, written by `plimsoll plan -o`.", rich_help_panel=options.PLAN
        ),
    ] = None,
    no_plan: Annotated[
        bool,
        typer.Option(
            "--no-plan",
            help="Use no techniques; halve the micro-batch on OOM.",
            rich_help_panel=options.PLAN,
        ),
    ] = False,
    no_trial: Annotated[
        bool,
        typer.Option("--no-trial", help="Do not time other candidates before training.", rich_help_panel=options.PLAN),
    ] = False,
    pins: Pins = None,
    forbids: Forbids = None,
    cache: Annotated[Path | None, options.cache("in the run directory")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Run directory.", rich_help_panel=options.OUTPUT)
    ] = Path("runs/latest"),
    force: Annotated[
        bool, typer.Option("--force", help="Delete the run in --out first.", rich_help_panel=options.OUTPUT)
    ] = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: AsJson = False,
) -> None:
    """Train a job inside a memory budget.

    The fastest plan that fits is used. If memory still runs out, the step is
    undone and repeated with smaller micro-batches. To continue after an
    interruption, use --resume.

    \b
    Examples:
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll train --resume --out runs/a
      plimsoll train job.yaml --set steps=500 --out runs/b
      plimsoll train job.yaml --plan plan.json --out runs/c
      plimsoll train job.yaml --nproc 4 --out runs/d
    """
    from plimsoll.cli.answer import limit_bytes_of, show_record
    from plimsoll.processes.children import is_rank
    from plimsoll.training.start import TrainRequest, start

    is_silent = is_rank() and os.environ["RANK"] != "0"
    with _failures_shown(out) if as_json and not is_silent else nullcontext():
        request = TrainRequest(
            out=out,
            job_file=job_file,
            budget_bytes=limit_bytes_of(budget),
            changes=tuple(changes or ()),
            resume=resume,
            from_step=from_step,
            given_plan=plan,
            has_plan=not no_plan,
            trial=not no_trial,
            pins=tuple(pins or ()),
            forbids=tuple(forbids or ()),
            num_ranks=num_ranks,
            cache=cache,
            force=force,
            quiet=quiet or as_json,
        )
        if code := start(request):
            sys.exit(code)
    if not is_silent:
        from plimsoll.records.run import RunRecord

        show_record(RunRecord.from_directory(out), as_json)


@contextmanager
def _failures_shown(out: Path) -> Iterator[None]:
    """Print JSON if the block fails: the record of the run if training has begun, else an object with the error."""
    from plimsoll.cli.output import failure_of, show, told, told_by
    from plimsoll.errors import PlimsollError
    from plimsoll.training.run_directory import failed_run, metrics_of

    metrics_before = metrics_of(out)
    with told() as file:
        try:
            yield
        except (PlimsollError, SystemExit) as end:
            record = failed_run(out, metrics_before)
            failure = failure_of(end) if isinstance(end, PlimsollError) else told_by(file, int(end.code or 0))
            show(failure if record is None else record.to_json())
            raise
