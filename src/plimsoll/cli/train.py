"""``plimsoll train``: a job trained inside its budget, under a supervisor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from plimsoll.records.job import Job
    from plimsoll.run.directory import RunDirectory


def train(  # noqa: PLR0917 -- typer calls it by name
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="The job file; left out with --resume.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run directory.")] = Path("runs/latest"),
    budget: Annotated[str | None, typer.Option(help="Memory the training may use, e.g. 2GiB.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest checkpoint.")
    ] = False,
    from_step: Annotated[int | None, typer.Option(help="With --resume: the checkpoint to go on from.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where tokens are kept; by default in the run directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove what is in --out first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's record as JSON; no progress.")] = False,
) -> None:
    """Train a job inside a memory budget; survive running out of memory.

    \b
    Examples:
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll train job.yaml --set steps=500 --set optimizer.lr=1e-3 --out runs/b
      plimsoll train --resume --out runs/a
      plimsoll train --resume --out runs/a --budget 1500MiB --from-step 100
    """
    from plimsoll.errors import InputError
    from plimsoll.records.run import RunRecord
    from plimsoll.report.render import render
    from plimsoll.run.supervise import supervise

    if resume and (force or cache):
        raise InputError(f"--resume goes on with what is in {out}: leave out --force and --cache, or drop --resume")
    if from_step is not None and not resume:
        raise InputError(f"--from-step {from_step} chooses a checkpoint to go on from: add --resume, or leave it out")
    if resume:
        directory = _opened(out, job_file)
        code = _gone_on(directory, _job(directory.job, budget, changes), from_step, as_json)
    elif job_file is None:
        raise InputError(
            f"no job file was given for {out}: write `plimsoll train job.yaml --out {out}`, "
            "or add --resume to go on with it"
        )
    else:
        code = supervise(_created(out, _job(job_file, budget, changes), cache, force, as_json), quiet=as_json)
    if code:
        sys.exit(code)
    print(render(RunRecord.from_directory(out), "json" if as_json else "text"))


def _job(job_file: Path, budget: str | None, changes: list[str] | None) -> Job:
    from plimsoll.records.job import Job

    return Job.from_yaml(job_file, (*(changes or ()), *(_budget_change(budget) if budget is not None else ())))


def _budget_change(budget: str) -> tuple[str]:
    from plimsoll.errors import BudgetError, InputError
    from plimsoll.records.units import parse_bytes

    try:
        return (f"budget.device={parse_bytes(budget)}",)
    except InputError as error:
        raise BudgetError(f"--budget: {error}") from None


def _created(out: Path, job: Job, cache: Path | None, force: bool, quiet: bool) -> RunDirectory:
    """Make the run directory, with its plan and its data."""
    from plimsoll.run.directory import RunDirectory
    from plimsoll.run.supervise import prepare_data

    directory = RunDirectory.create(out, force)
    _write(directory, job)
    code = prepare_data(directory, cache or directory.cache, quiet)
    if code:
        sys.exit(code)
    return directory


def _write(directory: RunDirectory, job: Job) -> None:
    from plimsoll.records.plan import micro_batch_plan
    from plimsoll.run.recover import micro_batch_sizes

    directory.write_job(job)
    micro_batch_plan(job.budget, micro_batch_sizes(job.batch_size)).save(directory.plan)


def _opened(out: Path, job_file: Path | None) -> RunDirectory:
    from plimsoll.errors import InputError
    from plimsoll.run.directory import RunDirectory

    if job_file is not None:
        raise InputError(
            f"--resume goes on with the job kept in {out}, so {job_file} would be ignored: "
            "leave it out, or drop --resume"
        )
    directory = RunDirectory.open(out)
    if not directory.prepared.is_file():
        raise InputError(
            f"{out} was stopped before its data was ready, so there is nothing to go on with: "
            "start it again with --force"
        )
    return directory


def _gone_on(directory: RunDirectory, job: Job, from_step: int | None, quiet: bool) -> int:
    """Go on with a run whose job ``--budget`` and ``--set`` may have changed; what is refused is not kept."""
    from plimsoll.errors import InputError
    from plimsoll.run.supervise import supervise

    job_before, plan_before, metrics_before = (
        path.read_bytes() for path in (directory.job, directory.plan, directory.metrics)
    )
    _write(directory, job)
    code = supervise(
        directory, ("--resume", *(("--from-step", str(from_step)) if from_step is not None else ())), quiet
    )
    if code == InputError.exit_code and directory.metrics.read_bytes() == metrics_before:
        directory.job.write_bytes(job_before)
        directory.plan.write_bytes(plan_before)
    return code
