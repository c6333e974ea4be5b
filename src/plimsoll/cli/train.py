"""``plimsoll train``: a job trained inside its budget, under a supervisor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plimsoll.records.job import Job
    from plimsoll.run.directory import RunDirectory


def train(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB", help="The job file; left out with --resume.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run directory.")] = Path("runs/latest"),
    budget: Annotated[str | None, typer.Option(help="Memory the training may use, e.g. 2GiB.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out from its newest checkpoint.")] = False,
    from_step: Annotated[int | None, typer.Option(help="With --resume: the checkpoint to go on from.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where tokens are kept; by default in the run directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove what is in --out first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's record as JSON; no progress.")] = False,
) -> None:
    """Train a job inside a memory budget; survive running out of memory.

    Examples: plimsoll train job.yaml --budget 2GiB --out runs/a, plimsoll train --resume --out runs/a
    """
    from plimsoll.errors import InputError, TornStepError
    from plimsoll.records.run import RunRecord
    from plimsoll.report.render import render
    from plimsoll.run.supervise import supervise

    if resume:
        directory = _opened(out, job_file, budget, changes)
    elif job_file is None:
        raise InputError(f"no job file was given for {out}: write `plimsoll train job.yaml --out {out}`, or add --resume to go on with it")
    else:
        directory = _created(out, _job(job_file, budget, changes), cache, force, as_json)
    arguments = ("--resume", *(("--from-step", str(from_step)) if from_step is not None else ())) if resume else ()
    code = supervise(directory, arguments, quiet=as_json)
    if code not in (0, TornStepError.exit_code):
        sys.exit(code)
    print(render(RunRecord.from_directory(out), "json" if as_json else "text"))


def _job(job_file: Path, budget: str | None, changes: list[str] | None) -> Job:
    from plimsoll.records.job import Job

    return Job.from_yaml(job_file, (*(changes or ()), *((f"budget.device={budget}",) if budget else ())))


def _created(out: Path, job: Job, cache: Path | None, force: bool, quiet: bool) -> RunDirectory:
    """Make the run directory, with its plan and its data."""
    from plimsoll.records.plan import micro_batch_plan
    from plimsoll.run.directory import RunDirectory
    from plimsoll.run.recover import micro_batch_sizes
    from plimsoll.run.supervise import prepare_data

    directory = RunDirectory.create(out, force)
    directory.write_job(job)
    micro_batch_plan(job.budget, micro_batch_sizes(job.batch_size)).save(directory.plan)
    code = prepare_data(directory, cache or directory.cache, quiet)
    if code:
        sys.exit(code)
    return directory


def _opened(out: Path, job_file: Path | None, budget: str | None, changes: list[str] | None) -> RunDirectory:
    """Open an earlier run; ``--budget`` and ``--set`` change its job (a checkpoint of another job is then refused)."""
    from plimsoll.errors import InputError
    from plimsoll.run.directory import RunDirectory

    if job_file is not None:
        raise InputError(f"--resume goes on with the job kept in {out}, so {job_file} would be ignored: leave it out, or drop --resume")
    directory = RunDirectory.open(out)
    if budget or changes:
        directory.write_job(_job(directory.job, budget, changes))
    return directory
