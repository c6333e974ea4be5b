"""The process that plans a run before the training: it makes the plan of a run directory, or copies a given plan.

This module does not import torch at the top, because unused parts of torch must be excluded first.
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
    """Make the plan of a run directory, or copy a plan from a file.

    Args:
        path: the run directory, with its ``job.yaml``. The budget of a given plan is written into ``job.yaml``.
        given: file of a plan for this job; ``None`` to make a plan.
        pins: pinned choices, see `plimsoll.records.plan.parse_pin`.
        forbids: names of forbidden techniques.
        quiet: print no progress and no result.
        goes_on: the run is resumed from a checkpoint, which is checked first.
        from_step: the step of the checkpoint; ``None`` for the newest.
        keep: with ``goes_on``, keep the existing plan if it is still valid.

    Raises:
        BudgetError: if nothing fits the budget; the error names a budget that would.
        CheckpointError: if the checkpoint does not exist, is damaged, or belongs to another job.
        InputError: if the given plan is for another job, or the pins contradict each other.
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
        print(f"ignored pin: {pin}: {reason}", file=sys.stderr)
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
    """Load a plan from a file, and write its budget into the job."""
    from plimsoll.planning.given_plan import require_same, without_trial

    plan = without_trial(Plan.load(path))
    directory.write_job(require_same(plan, job, str(path)))
    return plan


def _require_checkpoint(directory: RunDirectory, job: Job, from_step: int | None) -> None:
    """Raise early if the training process would refuse the checkpoint, because planning takes longer."""
    from plimsoll.models.assemble import fingerprint
    from plimsoll.training import checkpoint

    checkpoint.load(directory.checkpoints, fingerprint(job, Prepared.load(directory.prepared)), from_step)


def _is_still_good(directory: RunDirectory, job: Job, quiet: bool) -> bool:
    """Return whether the plan of a resumed run is still valid for the job and the code.

    Unless ``quiet`` is true, print the reasons if it is not.
    """
    from plimsoll.planning.given_plan import reasons_against

    reasons = reasons_against(Plan.load(directory.plan), job, texts_of(Prepared.load(directory.prepared)))
    if reasons and not quiet:
        print(f"the plan of this run is no longer valid: {'; '.join(reasons)}; planning again", file=sys.stderr)
    return not reasons
