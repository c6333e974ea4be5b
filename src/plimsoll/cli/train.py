"""``plimsoll train``: a job trained inside its budget, under a supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli.options import Quiet, Timings

if TYPE_CHECKING:
    from plimsoll.records.job import Job
    from plimsoll.training.run_directory import RunDirectory

    Then = Callable[[RunDirectory, tuple[str, ...], bool], int]
    """What follows when data and plan are there: the training, under a supervisor or of this rank."""


# long: its options
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
    plan: Annotated[Path | None, typer.Option(help="Run exactly this plan, made by `plimsoll plan -o`.")] = None,
    no_plan: Annotated[
        bool, typer.Option("--no-plan", help="Use no technique: begin with the whole batch, and halve it when need be.")
    ] = False,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Believe the plan: do not run others that are about as fast first.")
    ] = False,
    pins: Annotated[
        list[str] | None, typer.Option("--pin", metavar="CHOICE", help="Use this in the plan: checkpointing=all.")
    ] = None,
    forbids: Annotated[
        list[str] | None, typer.Option("--forbid", metavar="TECHNIQUE", help="Do not use this in the plan.")
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Processes of this machine that share each batch; the budget is of each."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Where tokens are kept; by default in the run directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove what is in --out first.")] = False,
    quiet: Quiet = False,
    _timings: Timings = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON record, also of a failure; no progress.")
    ] = False,
) -> None:
    """Train a job inside a memory budget, with the fastest plan that fits; survive running out of memory.

    \b
    Examples:
      plimsoll train job.yaml --budget 2GiB --out runs/a
      plimsoll train job.yaml --plan plan.json --out runs/a
      plimsoll train job.yaml --budget 2GiB --pin checkpointing=all --forbid activation_offload --out runs/b
      plimsoll train job.yaml --set steps=500 --set optimizer.lr=1e-3 --out runs/b
      plimsoll train --resume --out runs/a
      plimsoll train --resume --out runs/a --budget 1500MiB --from-step 100
      plimsoll train job.yaml --nproc 4 --out runs/d
      torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint host:29500 \\
        -m plimsoll train job.yaml --out /shared/runs/e
    """
    from plimsoll.cli.output import show
    from plimsoll.errors import InputError
    from plimsoll.files.child_processes import is_rank
    from plimsoll.report.progress import spinner

    is_silent, is_quiet = is_rank() and os.environ["RANK"] != "0", quiet or as_json
    with _failures_shown(out) if as_json and not is_silent else nullcontext():
        changes = [*(changes or ()), *_ranks_change(num_ranks)]
        if resume and (force or cache):
            given = " and ".join(name for name, value in {"--force": force, "--cache": cache}.items() if value)
            raise InputError(f"--resume goes on with what is in {out}: leave out {given}, or drop --resume")
        if from_step is not None and not resume:
            raise InputError(
                f"--from-step {from_step} chooses a checkpoint to go on from: add --resume, or leave it out"
            )
        if no_trial and (resume or no_plan):
            other = "--resume" if resume else "--no-plan"
            raise InputError(f"nothing is tried with {other}, so there is no trial to leave out: leave out --no-trial")
        planning = _planning(plan, no_plan, pins, forbids, resume)

        def run(then: Then) -> int:
            if resume:
                directory = _opened(out, job_file)
                with directory.claimed():  # nothing is changed under a process that trains here
                    return _gone_on(directory, _job(directory.job, budget, changes), from_step, is_quiet, then)
            with spinner(is_quiet):
                from plimsoll.planning.job_checks import require_sound
                from plimsoll.records.plan import parse_pin

                job, trial = _job(_given(job_file, out), budget, changes), ("--no-trial",) if no_trial else ()
                require_sound(job, pins=map(parse_pin, pins or ()), forbids=forbids or ())
            return _begun(out, job, planning, cache, force, is_quiet, then, trial)

        from plimsoll.training.supervise import supervise

        code = _as_a_rank(out, run, resume, from_step, is_quiet, trial=not no_trial) if is_rank() else run(supervise)
        if code:
            sys.exit(code)
    if is_silent:
        return
    from plimsoll.records.run import RunRecord
    from plimsoll.report.render import render

    show(render(RunRecord.from_directory(out), "json" if as_json else "text"))


@contextmanager
def _failures_shown(out: Path) -> Iterator[None]:
    """Print one JSON record if the block ends in a failure: the run's, if it failed in training, or the failure."""
    from plimsoll.cli.output import failure_of, show, told, told_by
    from plimsoll.errors import PlimsollError

    metrics_before = _metrics(out)
    with told() as file:
        try:
            yield
        except PlimsollError as error:
            show(_run_that_failed(out, metrics_before) or failure_of(error))
            raise
        except SystemExit as end:
            show(_run_that_failed(out, metrics_before) or told_by(file, int(end.code or 0)))
            raise


def _metrics(out: Path) -> bytes:
    try:
        return (out / "metrics.jsonl").read_bytes()
    except OSError:
        return b""


def _run_that_failed(out: Path, metrics_before: bytes) -> str | None:
    """The record of a run that this command wrote to, and that says itself how it ended."""
    from plimsoll.errors import RecordError
    from plimsoll.records.run import RunRecord

    if _metrics(out) in {b"", metrics_before}:
        return None
    try:
        record = RunRecord.from_directory(out)
    except RecordError:
        return None
    return record.to_json() if record.status in {"interrupted", "failed"} else None


def _given(job_file: Path | None, out: Path) -> Path:
    from plimsoll.errors import InputError

    if job_file is None:
        raise InputError(
            f"no job file was given for {out}: write `plimsoll train job.yaml --out {out}`, "
            "or add --resume to go on with it"
        )
    return job_file


def _ranks_change(num_ranks: int | None) -> tuple[str, ...]:
    """How many processes train together, where the command or torchrun says it."""
    from plimsoll.errors import InputError
    from plimsoll.files.child_processes import is_rank

    if not is_rank():
        if num_ranks is None and (world_size := os.environ.get("WORLD_SIZE") or "1") != "1":
            raise InputError(
                f"WORLD_SIZE={world_size} is in the environment and RANK is not: start the processes with torchrun, "
                "give --nproc, or unset WORLD_SIZE to train in one process"
            )
        return () if num_ranks is None else (f"ranks={num_ranks}",)
    if num_ranks is not None:
        raise InputError(
            f"--nproc {num_ranks} starts processes, but torchrun has started {os.environ['WORLD_SIZE']}: leave --nproc "
            "out, or start `plimsoll train` without torchrun"
        )
    return (f"ranks={os.environ['WORLD_SIZE']}",)


def _as_a_rank(
    out: Path, prepare: Callable[[Then], int], resume: bool, from_step: int | None, quiet: bool, *, trial: bool
) -> int:
    """Be one of the processes that torchrun has started; the first prepares what all train on."""
    from plimsoll.distributed.ranks import joined
    from plimsoll.records.job import Job
    from plimsoll.training.ranks import begun_again, prepared_by_first
    from plimsoll.training.run_directory import RunDirectory
    from plimsoll.training.worker import train_run

    with joined() as ranks:

        def plan_again() -> int:
            directory = RunDirectory(out)
            job = _job(directory.job, None, [f"ranks={ranks.world_size}"])
            with directory.claimed():
                return _planned_again(directory, job, Job.from_yaml(directory.job), (), quiet)

        code, restarts = prepared_by_first(ranks, out, lambda: prepare(lambda *_: 0), plan_again)
        if code:
            return code
        goes_on = restarts > 0
        fallback, too_large_fallback = (
            begun_again(ranks, RunDirectory.open(out, writes=ranks.rank == 0)) if goes_on else (None, None)
        )
        train_run(
            out,
            resume=resume and not goes_on,
            from_step=from_step,
            resume_newest=goes_on,
            fallback=fallback,
            too_large_fallback=too_large_fallback,
            restarts=restarts,
            quiet=quiet,
            trial=trial,
            ranks=ranks,
        )
    return 0


def _job(job_file: Path, budget: str | None, changes: list[str] | None) -> Job:
    from plimsoll.cli.answer import limit_bytes_of
    from plimsoll.records.job import Job

    limited = () if budget is None else (f"budget.device={limit_bytes_of(budget)}",)
    return Job.from_yaml(job_file, (*(changes or ()), *limited))


def _planning(
    plan: Path | None, no_plan: bool, pins: list[str] | None, forbids: list[str] | None, resume: bool
) -> tuple[str, ...] | None:
    """The arguments of the process that plans; ``None`` for no plan."""
    from plimsoll.errors import InputError
    from plimsoll.records.plan import Plan, check_pins, parse_pin

    check_pins([parse_pin(pin) for pin in pins or ()], forbids or ())
    constraints = (*(("--pin", pin) for pin in pins or ()), *(("--forbid", name) for name in forbids or ()))
    given = [*([f"--plan {plan}"] if plan else []), *(["--no-plan"] if no_plan else []), *map(" ".join, constraints)]
    if resume and given:
        raise InputError(f"--resume goes on with the plan of the run: leave out {', '.join(given)}, or drop --resume")
    if (plan or no_plan) and len(given) > 1:
        raise InputError(f"{given[0]} leaves nothing to plan: leave it out, or {', '.join(given[1:])}")
    if plan is not None:
        Plan.load(plan)
        return ("--given", str(plan.resolve()))
    return None if no_plan else tuple(word for constraint in constraints for word in constraint)


def _begun(  # noqa: PLR0917 -- one call
    out: Path, job: Job, planning: tuple[str, ...] | None, cache: Path | None, force: bool, quiet: bool, then: Then,
    trial: tuple[str, ...],
) -> int:  # fmt: skip
    """Make the run directory, with its data and its plan, and train."""
    from plimsoll.training.processes import loading_once
    from plimsoll.training.run_directory import RunDirectory
    from plimsoll.training.supervise import prepare_data

    directory = RunDirectory.create(out, force)
    is_given = planning is not None and planning[:1] == ("--given",)
    with directory.claimed():
        _write(directory, job)
        with loading_once(directory):
            # What can be refused is refused before the data are prepared, which may take hours.
            code = _planned(directory, job, planning, quiet) if is_given else 0
            constraints = () if is_given else planning or ()
            return (
                code
                or prepare_data(directory, cache or directory.cache, quiet, constraints=constraints)
                or (0 if is_given else _planned(directory, job, planning, quiet))
                or then(directory, trial, quiet)
            )


def _planned(directory: RunDirectory, job: Job, planning: tuple[str, ...] | None, quiet: bool) -> int:
    from plimsoll.training.supervise import make_plan

    return make_plan(directory, planning, quiet) if planning is not None and _has_line(job, planning) else 0


def _has_line(job: Job, constraints: tuple[str, ...]) -> bool:
    """Whether there is a line to stay under, a budget or the memory of a GPU, or something is asked for for."""
    from plimsoll.device.cuda import nvml

    is_on_cpu = job.device == "cpu" or (job.device == "auto" and nvml.driver_version() is None)
    return bool(constraints or job.pin) or job.budget.device_bytes is not None or not is_on_cpu


def _write(directory: RunDirectory, job: Job) -> None:
    """Write the job, and the plan that is in force without any other."""
    from plimsoll.records.plan import micro_batch_plan
    from plimsoll.step.recovery import micro_batch_sizes, samples_of_rank

    directory.write_job(job)
    sizes = micro_batch_sizes(samples_of_rank(job))
    micro_batch_plan(job.budget, sizes).save(directory.plan)


def _planned_again(directory: RunDirectory, job: Job, before: Job, from_where: tuple[str, ...], quiet: bool) -> int:
    """Keep the plan of a run that goes on; for another budget, or of other code by now, plan again as was asked for."""
    from plimsoll.errors import RecordError
    from plimsoll.records.plan import Plan
    from plimsoll.training.supervise import make_plan

    try:
        plan, is_same = Plan.load(directory.plan), (job.budget, job.ranks) == (before.budget, before.ranks)
    except RecordError:
        _write(directory, job)
        if not _has_line(job, ()):
            return 0
        print(
            f"{directory.plan} cannot be read: planning again, without what the first plan had pinned or forbidden",
            file=sys.stderr,
        )
        return make_plan(directory, ("--goes-on", *from_where), quiet)
    directory.write_job(job)
    if plan.limit_bytes is None:
        if job.ranks != before.ranks:
            _write(directory, job)
        elif not is_same:
            plan.model_copy(update={"budget": job.budget}).save(directory.plan)
        return 0
    pins = (*map(str, plan.pinned), *plan.required, *plan.left_out)
    pairs = [*(("--pin", pin) for pin in pins), *(("--forbid", name) for name in plan.forbidden)]
    constraints = tuple(word for pair in pairs for word in pair)
    if not (is_same or _has_line(job, constraints)):
        _write(directory, job)
        return 0
    keep = ("--keep",) if is_same or (plan.budget == job.budget and job.ranks == before.ranks) else ()
    return make_plan(directory, ("--goes-on", *from_where, *keep, *constraints), quiet)


def _opened(out: Path, job_file: Path | None) -> RunDirectory:
    from plimsoll.errors import InputError, OutputError
    from plimsoll.training.run_directory import RunDirectory

    if job_file is not None:
        raise InputError(
            f"--resume goes on with the job kept in {out}, so {job_file} would be ignored: "
            "leave it out, or drop --resume"
        )
    if not (out / "metrics.jsonl").is_file():
        every = sorted(out.parent.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        beside = [path for path in every if any((path.parent / "checkpoints").glob("*"))]
        which = (
            f" for the newest of {len(beside)} with a checkpoint in {out.parent}"
            if beside
            else ", with the directory of the run"
        )
        raise OutputError(
            f"{out} is not a run directory, so --resume has nothing to go on with: write `plimsoll train --resume "
            f"--out {beside[-1].parent if beside else 'DIRECTORY'}`{which}"
        )
    directory = RunDirectory.open(out)
    if not directory.prepared.is_file():
        raise InputError(
            f"{out} was stopped before its data was ready, so there is nothing to go on with: "
            f"start it again with `plimsoll train job.yaml --out {out}`"
        )
    return directory


def _prepared_again(directory: RunDirectory, quiet: bool, other_data: bool) -> int:
    """Make the tokens again if the cache was deleted, where they were; of a run that was moved, in its directory.

    Where the job names other data than before, they must come to the same tokens.
    """
    from plimsoll.data.prepare import is_whole
    from plimsoll.records.prepared import Prepared
    from plimsoll.training.supervise import prepare_data

    prepared = Prepared.load(directory.prepared)
    if is_whole(prepared) and not other_data:
        return 0
    cache = Path(prepared.train.index_folder).parent
    return prepare_data(directory, cache if cache.parent.is_dir() else directory.cache, quiet, again=True)


def _gone_on(directory: RunDirectory, job: Job, from_step: int | None, quiet: bool, then: Then) -> int:
    """Go on with a run whose job ``--budget`` and ``--set`` may have changed; what is refused is not kept."""
    from plimsoll.errors import InputError, JobError
    from plimsoll.records.base import write_atomically
    from plimsoll.records.job import Job
    from plimsoll.training.processes import loading_once

    before, done = Job.from_yaml(directory.job), directory.last_saved_step()
    if from_step is None and job.steps < done:
        raise JobError(f"steps is {job.steps}, but {done} are done: give as many or more, or choose with --from-step")
    if from_step is None and _is_finished(directory, job, before):
        if not quiet:
            print(f"all {done} steps are done; for more, give --set steps= and how many in all", file=sys.stderr)
        return 0
    kept = {path: path.read_bytes() for path in (directory.job, directory.plan)}
    metrics_before = directory.metrics.read_bytes()
    read = ("data", "tokenizer", "task", "embeddings")
    other_data = any(getattr(job, name) != getattr(before, name) for name in read)
    from_where = ("--from-step", str(from_step)) if from_step is not None else ()
    is_ready, code = False, InputError.exit_code
    try:
        with loading_once(directory):
            code = _planned_again(directory, job, before, from_where, quiet) or _prepared_again(
                directory, quiet, other_data
            )
            is_ready = not code
            code = code or then(directory, ("--resume", *from_where), quiet)
    finally:
        is_there = directory.metrics.is_file()  # or it was deleted meanwhile
        is_refused = is_there and code == InputError.exit_code and directory.metrics.read_bytes() == metrics_before
        for path, content in kept.items() if is_refused or (is_there and not is_ready) else ():
            write_atomically(path, content)
    return code


def _is_finished(directory: RunDirectory, job: Job, before: Job) -> bool:
    """Whether nothing is left to do; where more than the budget was changed, the training process says what of it."""
    from plimsoll.records.run import EndLine

    end = next(reversed(directory.lines()), None)
    if not isinstance(end, EndLine) or end.status != "finished" or end.step < job.steps:
        return False
    is_same = job.model_copy(update={"budget": before.budget}) == before
    return is_same and (directory.model / "tokenizer_config.json").is_file()  # which is written last
