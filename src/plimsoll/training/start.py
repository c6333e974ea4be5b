"""The phase of `plimsoll train` before training: create or open the run directory, and prepare its data and plan.

    code = start(TrainRequest(job_file=Path("job.yaml"), out=Path("runs/a"), budget_bytes=2 << 30))

Then a supervisor starts the training process (`plimsoll.training.supervise`). If torchrun has started this process as a
rank, this process itself trains the model. The job is read once, with its budget in bytes, and saved in the run
directory for the other processes of the run. Does not import torch, except as a rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plimsoll.device.cuda import nvml
from plimsoll.errors import InputError, JobError, OutputError, RecordError
from plimsoll.models.names import require_technique
from plimsoll.processes.children import is_rank
from plimsoll.records.base import write_atomically
from plimsoll.records.job import Job
from plimsoll.records.job_yaml import read_fields
from plimsoll.records.plan import Pin, Plan, check_pins, micro_batch_plan, parse_pin
from plimsoll.records.run import EndLine
from plimsoll.report.progress import spinner
from plimsoll.step.recovery import micro_batch_sizes, samples_of_rank
from plimsoll.training.processes import loading_once
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.supervise import make_plan, prepare_data, supervise

Train = Callable[[RunDirectory, tuple[str, ...], bool, int], int]
"""The function that is called after data and plan are prepared: `supervise`, or on a rank a function without effect.

Its arguments are the run directory, further arguments of the training process, whether to be quiet, and the number of
ranks. It returns an exit code.
"""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The options of `plimsoll train`.

    Args:
        out: the run directory.
        job_file: file of the job; ``None`` to use the job that is saved in ``out``.
        budget_bytes: budget of device memory in bytes; ``None`` for the budget of the job.
        changes: changed fields of the job, as ``a.b=c``.
        resume: resume the run in ``out``.
        from_step: with ``resume``, the step of the checkpoint to resume from; ``None`` for the newest.
        given_plan: file of a plan to use unchanged.
        has_plan: whether to make a plan; without a plan, no techniques are used.
        trial: whether to measure the candidates of the plan before training.
        pins: choices that the plan must contain, in the format of `plimsoll.records.plan.parse_pin`.
        forbids: techniques that the plan must not contain.
        num_ranks: number of ranks to start on this machine; ``None`` for the number in the job.
        cache: folder for tokens; ``None`` for the run directory.
        force: remove an existing run in ``out`` first.
        quiet: show no progress.
    """

    out: Path
    job_file: Path | None = None
    budget_bytes: int | None = None
    changes: tuple[str, ...] = ()
    resume: bool = False
    from_step: int | None = None
    given_plan: Path | None = None
    has_plan: bool = True
    trial: bool = True
    pins: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    num_ranks: int | None = None
    cache: Path | None = None
    force: bool = False
    quiet: bool = False

    @cached_property
    def pinned(self) -> tuple[Pin, ...]:
        """The parsed pins."""
        return tuple(map(parse_pin, self.pins))

    @property
    def constraints(self) -> tuple[str, ...]:
        """The pins and forbidden techniques, as command-line arguments for the processes that prepare data and plan."""
        return _as_arguments(self.pins, self.forbids)

    def job(self, fields: dict[str, Any], path: Path) -> Job:
        """Return the job with the changes, the number of ranks and the budget of this request.

        Args:
            fields: fields of the job file.
            path: the job file.

        Raises:
            JobError: see `Job.from_written`.
        """
        return Job.from_written(fields, path, (*self.changes, *_ranks_change(self.num_ranks)), self.budget_bytes)


def start(request: TrainRequest) -> int:
    """Start or resume a run, and train to its end.

    Returns:
        0, or the exit code of the process that failed. That process has reported the error.

    Raises:
        InputError: if the request is invalid; no files have been written then.
        PlimsollError: see `supervise`, and on a rank `plimsoll.training.session.Session`.
    """
    _check(request)
    return _train_as_rank(request) if is_rank() else _begin_or_resume(request, supervise)


def _begin_or_resume(request: TrainRequest, train: Train) -> int:
    return _resume(request, train) if request.resume else _begin(request, train)


def _check(request: TrainRequest) -> None:
    """Raise if options contradict each other."""
    _ranks_change(request.num_ranks)
    out, resume, from_step = request.out, request.resume, request.from_step
    if resume and (request.force or request.cache):
        options = {"--force": request.force, "--cache": request.cache}
        given = " and ".join(name for name, value in options.items() if value)
        raise InputError(f"--resume continues the run in {out}: leave out {given}, or drop --resume")
    if from_step is not None and not resume:
        raise InputError(f"--from-step {from_step} is a checkpoint to continue from: add --resume, or leave it out")
    if not request.trial and (resume or not request.has_plan):
        other = "--resume" if resume else "--no-plan"
        raise InputError(f"--no-trial has no effect with {other}, which never runs a trial: leave out --no-trial")
    check_pins(request.pinned, request.forbids)
    _check_plan(request)


def _check_plan(request: TrainRequest) -> None:
    is_settled = request.given_plan is not None or not request.has_plan
    given = [
        *([f"--plan {request.given_plan}"] if request.given_plan else []),
        *([] if request.has_plan else ["--no-plan"]),
        *(f"--pin {pin}" for pin in request.pins),
        *(f"--forbid {name}" for name in request.forbids),
    ]
    if request.resume and given:
        raise InputError(f"--resume continues with the plan of the run: leave out {', '.join(given)}, or drop --resume")
    if is_settled and len(given) > 1:
        raise InputError(f"{given[0]} cannot be combined with {', '.join(given[1:])}: leave one of them out")
    if request.given_plan is not None:
        _require_techniques(Plan.load(request.given_plan), request.given_plan)


def _require_techniques(plan: Plan, source: Path) -> None:
    """Raise if the plan contains a technique that is not installed."""
    configurations = (*plan.fallbacks, *(candidate.configuration for candidate in plan.candidates))
    for name in dict.fromkeys(choice.technique for one in configurations for choice in one.choices):
        try:
            require_technique(name)
        except InputError as error:
            raise InputError(
                f"the plan {source} cannot be used here: {error}; install the package that provides it, or make a new "
                "plan with `plimsoll plan`"
            ) from None


def _ranks_change(num_ranks: int | None) -> tuple[str, ...]:
    """Return the number of ranks, from --nproc or torchrun, as a job override such as ``ranks=2``.

    The tuple is empty if neither sets the number.
    """
    if not is_rank():
        if num_ranks is None and (world_size := os.environ.get("WORLD_SIZE") or "1") != "1":
            raise InputError(
                f"WORLD_SIZE={world_size} is set, but RANK is not: start the processes with torchrun, "
                "give --nproc, or unset WORLD_SIZE to train in one process"
            )
        return () if num_ranks is None else (f"ranks={num_ranks}",)
    if num_ranks is not None:
        raise InputError(
            f"--nproc {num_ranks} starts processes, but torchrun has started {os.environ['WORLD_SIZE']} already: leave "
            "--nproc out, or start `plimsoll train` without torchrun"
        )
    return (f"ranks={os.environ['WORLD_SIZE']}",)


def _train_as_rank(request: TrainRequest) -> int:
    """Train as one of the ranks that torchrun has started. Rank 0 prepares data and plan."""
    from plimsoll.distributed.ranks import joined
    from plimsoll.training.ranks import begun_again, prepared_by_first
    from plimsoll.training.session import Session

    out = request.out
    with joined() as ranks:

        def plan_again() -> int:
            directory = RunDirectory(out)
            fields = read_fields(directory.job)
            job = Job.from_written(fields, directory.job, (f"ranks={ranks.world_size}",))
            with directory.claimed():
                return _plan_again(directory, job, Job.from_written(fields, directory.job), (), request.quiet)

        code, restarts = prepared_by_first(ranks, out, lambda: _begin_or_resume(request, lambda *_: 0), plan_again)
        if code:
            return code
        goes_on = restarts > 0
        fallback, too_large_fallback = (
            begun_again(ranks, RunDirectory.open(out, writes=ranks.rank == 0)) if goes_on else (None, None)
        )
        Session(
            out,
            resume=request.resume and not goes_on,
            from_step=request.from_step,
            resume_newest=goes_on,
            fallback=fallback,
            too_large_fallback=too_large_fallback,
            restarts=restarts,
            quiet=request.quiet,
            trial=request.trial,
            ranks=ranks,
        ).run()
    return 0


def _begin(request: TrainRequest, train: Train) -> int:
    """Create the run directory, prepare data and plan, and train."""
    job = _sound_job(request)
    directory, quiet = RunDirectory.create(request.out, request.force), request.quiet
    with directory.claimed():
        _write(directory, job)
        with loading_once(directory):
            cache, trial = request.cache or directory.cache, () if request.trial else ("--no-trial",)
            if request.given_plan is None:
                code = prepare_data(directory, cache, quiet, constraints=request.constraints)
                if not code and request.has_plan and _has_line(job, request.constraints):
                    code = make_plan(directory, request.constraints, quiet)
            else:  # check the plan before the data are prepared, which may take hours
                code = make_plan(directory, ("--given", str(request.given_plan.resolve())), quiet)
                code = code or prepare_data(directory, cache, quiet)
            return code or train(directory, trial, quiet, job.ranks)


def _sound_job(request: TrainRequest) -> Job:
    """Read the job, and raise early for errors that can be found without torch."""
    if request.job_file is None:
        raise InputError(
            f"no job file was given for {request.out}: write `plimsoll train job.yaml --out {request.out}`, "
            "or add --resume to continue it"
        )
    with spinner(request.quiet):
        from plimsoll.planning.job_checks import require_sound  # as slow as all imports above together

        job = request.job(read_fields(request.job_file), request.job_file)
        require_sound(job, pins=request.pinned, forbids=request.forbids)
    return job


def _resume(request: TrainRequest, train: Train) -> int:
    """Resume a run with the changes of ``--budget`` and ``--set``.

    If the changes are invalid, the job and plan in the run directory stay as they were.
    """
    directory = _opened(request.out, request.job_file)
    with directory.claimed():  # waits for an earlier training process, which must not see the files change
        fields = read_fields(directory.job)
        job, before = request.job(fields, directory.job), Job.from_written(fields, directory.job)
        done = directory.last_saved_step()
        if request.from_step is None and job.steps < done:
            raise JobError(
                f"steps is {job.steps}, but {done} steps are done: give at least that many, or choose with --from-step"
            )
        if request.from_step is None and _is_finished(directory, job, before):
            if not request.quiet:
                print(f"all {done} steps are done; to train longer, give --set steps=<new total>", file=sys.stderr)
            return 0
        return _go_on(directory, job, before, request, train)


def _go_on(directory: RunDirectory, job: Job, before: Job, request: TrainRequest, train: Train) -> int:
    kept = {path: path.read_bytes() for path in (directory.job, directory.plan)}
    metrics_before, quiet = directory.metrics.read_bytes(), request.quiet
    from_where = () if request.from_step is None else ("--from-step", str(request.from_step))
    is_ready, code = False, InputError.exit_code
    try:
        with loading_once(directory):
            code = _plan_again(directory, job, before, from_where, quiet)
            code = code or _prepare_again(directory, job, before, quiet)
            is_ready = not code
            code = code or train(directory, ("--resume", *from_where), quiet, job.ranks)
    finally:
        is_there = directory.metrics.is_file()  # the run directory may have been deleted meanwhile
        is_refused = is_there and code == InputError.exit_code and directory.metrics.read_bytes() == metrics_before
        for path, content in kept.items() if is_refused or (is_there and not is_ready) else ():
            write_atomically(path, content)
    return code


def _opened(out: Path, job_file: Path | None) -> RunDirectory:
    if job_file is not None:
        raise InputError(
            f"--resume continues the job in {out}, so {job_file} would be ignored: leave it out, or drop --resume"
        )
    if not (out / "metrics.jsonl").is_file():
        every = sorted(out.parent.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        beside = [path for path in every if any((path.parent / "checkpoints").glob("*"))]
        which = (
            f" for the newest of {len(beside)} runs with a checkpoint in {out.parent}"
            if beside
            else ", with the directory of the run"
        )
        raise OutputError(
            f"{out} is not a run directory, so there is nothing to resume: write `plimsoll train --resume "
            f"--out {beside[-1].parent if beside else 'DIRECTORY'}`{which}"
        )
    directory = RunDirectory.open(out)
    if not directory.prepared.is_file():
        raise InputError(
            f"{out} was stopped before its data was ready, so there is nothing to resume: "
            f"start it again with `plimsoll train job.yaml --out {out}`"
        )
    return directory


def _is_finished(directory: RunDirectory, job: Job, before: Job) -> bool:
    """Return whether the run is finished, and the job has not changed since, except for its budget.

    The training process checks other changes.
    """
    end = next(reversed(directory.lines()), None)
    if not isinstance(end, EndLine) or end.status != "finished" or end.step < job.steps:
        return False
    is_same = job.model_copy(update={"budget": before.budget}) == before
    return is_same and (directory.model / "tokenizer_config.json").is_file()  # the file that is written last


def _has_line(job: Job, constraints: tuple[str, ...]) -> bool:
    """Return whether the run needs a plan, because it has a budget, constraints or a GPU."""
    is_on_cpu = job.device == "cpu" or (job.device == "auto" and nvml.driver_version() is None)
    return bool(constraints or job.pin) or job.budget.device_bytes is not None or not is_on_cpu


def _write(directory: RunDirectory, job: Job) -> None:
    """Write the job, and the default plan: no techniques, and smaller micro-batches as its only fallbacks."""
    directory.write_job(job)
    micro_batch_plan(job.budget, micro_batch_sizes(samples_of_rank(job))).save(directory.plan)


def _plan_again(directory: RunDirectory, job: Job, before: Job, from_where: tuple[str, ...], quiet: bool) -> int:
    """Keep the plan of a resumed run if it is still valid, otherwise plan again with the same constraints.

    A plan may become invalid if the budget, the number of ranks or the code has changed.

    Returns:
        0, or the exit code of the planning process.
    """
    try:
        plan, is_same = Plan.load(directory.plan), (job.budget, job.ranks) == (before.budget, before.ranks)
    except RecordError:
        _write(directory, job)
        if not _has_line(job, ()):
            return 0
        print(
            f"{directory.plan} cannot be read: planning again, without the pins and forbidden techniques of that plan",
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
    constraints = _as_arguments((*map(str, plan.pinned), *plan.required, *plan.left_out), plan.forbidden)
    if not (is_same or _has_line(job, constraints)):
        _write(directory, job)
        return 0
    keep = ("--keep",) if is_same or (plan.budget == job.budget and job.ranks == before.ranks) else ()
    return make_plan(directory, ("--goes-on", *from_where, *keep, *constraints), quiet)


def _prepare_again(directory: RunDirectory, job: Job, before: Job, quiet: bool) -> int:
    """Repeat the tokenization if the cache was deleted or the job names other data; the tokens must be the same.

    The tokens are written to the same folder as before or, if the run was moved, to the run directory.
    """
    from plimsoll.data.prepare import is_whole
    from plimsoll.records.prepared import Prepared

    read = ("data", "tokenizer", "task", "embeddings")
    prepared = Prepared.load(directory.prepared)
    if is_whole(prepared) and all(getattr(job, name) == getattr(before, name) for name in read):
        return 0
    cache = Path(prepared.train.index_folder).parent
    return prepare_data(directory, cache if cache.parent.is_dir() else directory.cache, quiet, again=True)


def _as_arguments(pins: tuple[str, ...], forbids: tuple[str, ...]) -> tuple[str, ...]:
    pairs = [*(("--pin", pin) for pin in pins), *(("--forbid", name) for name in forbids)]
    return tuple(word for pair in pairs for word in pair)
