"""``plimsoll explain``: what uses memory, or why it ran out, what would free it, and the job changed so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plimsoll.cli.options import AsJson, Force, Quiet


def explain(  # noqa: PLR0917 -- typer calls it by name
    source: Annotated[
        Path,
        typer.Argument(
            metavar="[SOURCE]",
            help="A job, a run directory, or a file with an error's text, a log, a watch or a snapshot; - reads.",
        ),
    ] = Path("-"),
    budget: Annotated[
        str | None, typer.Option(help="Memory the training may use, e.g. 2GiB. Default: the job's, or what there is.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where it trains: local, cpu, cuda, or a device by name. Default: the job's.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the job changed by the first remedy that fits.")
    ] = False,
    remedy: Annotated[
        int | None, typer.Option(min=1, help="With --apply: the number of another remedy of the table.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --apply: where. Default: beside the job, as NAME-fixed.yaml."),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Say what uses memory, or why it ran out, and what would free it. Ends with 1 if it found something, else with 0.

    \b
    Examples:
      plimsoll explain job.yaml --budget 2GiB
      plimsoll explain job.yaml --budget 2GiB --apply -o smaller.yaml
      plimsoll explain runs/a
      plimsoll explain runs/a --apply --remedy 2
      plimsoll explain train.log
      plimsoll explain snapshot.pickle
      python train.py 2>&1 | plimsoll explain
      plimsoll explain runs/a --json
      plimsoll explain watch.jsonl
      zcat snapshot.pickle.gz | plimsoll explain
    """
    from plimsoll.cli.answer import answering, limit_bytes_of
    from plimsoll.cli.output import show
    from plimsoll.diagnose.fixed_job import FixedJob, require_known_training
    from plimsoll.diagnose.source import explain_source
    from plimsoll.errors import InputError
    from plimsoll.report.render import render

    with answering("the explanation", as_json):
        limit_bytes = limit_bytes_of(budget)
        if not apply and (remedy is not None or output is not None):
            given = f"--remedy {remedy}" if remedy is not None else f"-o {output}"
            raise InputError(f"{given} is of a job that is written: add --apply, or leave it out")
        job_file = require_known_training(source, {"--apply": apply, "--budget": budget, "--device": device})
        fixed = FixedJob.beside(job_file, output, force) if apply and job_file else None
        diagnosis = explain_source(source, device, limit_bytes, quiet or as_json)
        if not as_json:
            show(render(diagnosis, "text"))
        if fixed is not None:
            print(fixed.write(diagnosis, remedy), file=sys.stderr)
        if as_json:  # one record: this, or why no job was written
            show(render(diagnosis, "json"))
    if diagnosis.has_answer:
        raise typer.Exit(1)
