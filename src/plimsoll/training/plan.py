"""The process that plans a run, before a process trains: it makes the plan of a run directory, or takes one over.

Nothing at the top of this module imports torch, which is told first what the job does not use of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from plimsoll.data.quick_facts import texts_of
from plimsoll.planning.cached_answers import plan_of
from plimsoll.planning.calibration import known_calibration
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.processes.children import begin_worker
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan, parse_pin
from plimsoll.records.prepared import Prepared
from plimsoll.report.plan_sheets import headline
from plimsoll.report.progress import spinner
from plimsoll.training.baseline import load_training
from plimsoll.training.run_directory import RunDirectory


def plan_run(  # noqa: PLR0917 -- of a command
    path: Path,
    given: Path | None,
    pins: tuple[str, ...],
    forbids: tuple[str, ...],
    quiet: bool,
    goes_on: bool = False,
    from_step: int | None = None,
    keep: bool = False,
) -> None:
    """Make the plan of a run directory, or take one from a file.

    Args:
        path: the run directory, with its ``job.yaml``; the budget of a plan that is given is written into it.
        given: a plan made before; it must be of this job.
        pins: see `plimsoll.records.plan.parse_pin`.
        forbids: names of techniques.
        quiet: show nothing on standard error.
        goes_on: the run goes on from a checkpoint, which is looked for first.
        from_step: the step of that checkpoint; ``None`` for the newest.
        keep: with ``goes_on``, the plan that is there stays unless it is of something else by now.

    Raises:
        BudgetError: if nothing fits the budget; it says what would.
        CheckpointError: if there is no such checkpoint, or it is torn or of another job.
        InputError: if the plan that is given is of something else, or the pins contradict each other.
    """
    begin_worker()
    directory = RunDirectory(path)
    job = Job.from_yaml(directory.job)
    leave_out_unused(job)
    if goes_on:
        _require_checkpoint(directory, job, from_step)
        if keep and _is_still_good(directory, job, quiet):
            return
    with spinner(quiet) as progress:
        plan = _made(directory, job, pins, forbids, progress) if given is None else _given(directory, job, given)
    plan.save(directory.plan)
    for pin, reason in plan.left_out.items():
        print(f"what is pinned is left out: {pin}: {reason}", file=sys.stderr)
    if not quiet:
        print(f"plan: {' + '.join(map(str, plan.fallbacks[0].choices))}. {headline(plan)}", file=sys.stderr)


def _made(
    directory: RunDirectory, job: Job, pins: tuple[str, ...], forbids: tuple[str, ...], progress: Callable[[str], None]
) -> Plan:
    from plimsoll.planning.given_plan import require_that_fits

    plan, _ = plan_of(
        job,
        pins=[parse_pin(pin) for pin in pins],
        forbids=forbids,
        calibration=known_calibration(),
        progress=progress,
        texts=texts_of(Prepared.load(directory.prepared)),
        load_training=load_training,
    )
    require_that_fits(plan)
    return plan


def _given(directory: RunDirectory, job: Job, path: Path) -> Plan:
    """The plan of a file, whose budget is the job's from now on."""
    from plimsoll.planning.given_plan import require_same, without_trial

    plan = without_trial(Plan.load(path))
    directory.write_job(require_same(plan, job, str(path)))
    return plan


def _require_checkpoint(directory: RunDirectory, job: Job, from_step: int | None) -> None:
    """Refuse what the training process would refuse, before the plan is made, which takes longer."""
    from plimsoll.models.assemble import fingerprint
    from plimsoll.training import checkpoint

    checkpoint.load(directory.checkpoints, fingerprint(job, Prepared.load(directory.prepared)), from_step)


def _is_still_good(directory: RunDirectory, job: Job, quiet: bool) -> bool:
    """Whether the plan of a run that goes on is for its budget and of its code; says what differs."""
    from plimsoll.planning.given_plan import reasons_against

    reasons = reasons_against(Plan.load(directory.plan), job, texts_of(Prepared.load(directory.prepared)))
    if reasons and not quiet:
        print(f"the plan of this run no longer holds: {'; '.join(reasons)}; planning again", file=sys.stderr)
    return not reasons
