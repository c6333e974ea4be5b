"""``plimsoll explain``: causes of memory use or of an out-of-memory error, and a job file with one remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli import options
from plimsoll.cli.options import AsJson, Device, Force, Quiet

_FIX = "Changed job (with --apply)"


def explain(  # noqa: PLR0917 -- typer calls it by name
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Job, run, error text, log, watch or snapshot.",
            show_default="-, standard input",
        ),
    ] = Path("-"),
    budget: Annotated[str | None, options.budget(options.OR_ALL_MEMORY)] = None,
    device: Device = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Write the job with the first remedy that fits.", rich_help_panel=_FIX),
    ] = False,
    remedy: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Apply remedy N of the table, not the first that fits.",
            show_default="the first that fits",
            rich_help_panel=_FIX,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The changed job.",
            show_default="NAME-fixed.yaml next to the job",
            rich_help_panel=_FIX,
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Explain memory use or an out-of-memory error, with remedies.

    Exit code 1 if there is a finding, a remedy or an out-of-memory error.

    \b
    Examples:
      plimsoll explain train.log
      plimsoll explain runs/a
      plimsoll explain job.yaml --budget 2GiB --apply -o smaller.yaml
      python train.py 2>&1 | plimsoll explain
      zcat snapshot.pickle.gz | plimsoll explain
    """
    from plimsoll.cli.answer import answering, limit_bytes_of
    from plimsoll.cli.output import show
    from plimsoll.diagnose.fixed_job import FixedJob, require_known_training
    from plimsoll.diagnose.source import explain_source
    from plimsoll.errors import InputError
    from plimsoll.report.render import render

    with answering("explaining", as_json):
        limit_bytes = limit_bytes_of(budget)
        if not apply and (remedy is not None or output is not None):
            given = f"--remedy {remedy}" if remedy is not None else f"-o {output}"
            raise InputError(f"{given} needs --apply, which writes a changed job: add --apply, or leave it out")
        job_file = require_known_training(source, {"--apply": apply, "--budget": budget, "--device": device})
        fixed = FixedJob.beside(job_file, output, force) if apply and job_file else None
        diagnosis = explain_source(source, device, limit_bytes, quiet or as_json)
        if not as_json:
            show(render(diagnosis, "text"))
        if fixed is not None:
            print(fixed.write(diagnosis, remedy), file=sys.stderr)
        if as_json:  # after write(), so that its failure is the only record
            show(render(diagnosis, "json"))
    if diagnosis.has_answer:
        raise typer.Exit(1)
