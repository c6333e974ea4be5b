"""Checks of whether a run can use an existing plan: it fits, is for the same training, and is within the budget."""

from __future__ import annotations

from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.device.base import backend_for
from plimsoll.device.cuda.gpus import spec_of
from plimsoll.errors import BudgetError, InputError
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.assemble import choose_device
from plimsoll.planning.plan_validity import differences, facts_of
from plimsoll.planning.targets import Target, gpu_target
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan, Trial
from plimsoll.records.units import format_bytes


def require_that_fits(plan: Plan) -> None:
    """Check that a plan fits its budget.

    Raises:
        BudgetError: if the plan does not fit; the message names the smallest budget, and lossy techniques that would
            help.
    """
    if plan.fits:
        return
    assert plan.smallest_budget_bytes is not None
    leanest = " ".join(map(str, plan.choices))
    budget = f"{-(-plan.smallest_budget_bytes >> 20)}MiB"
    lossy_alternatives = "".join(f"; {' '.join(map(str, one.choices))} {one.reason}" for one in plan.lossy_alternatives)
    check = plan.loss_check
    uncut = f"; the batch is not cut, because {check.why}: {check.remedy}" if check and not check.may_cut else ""
    raise BudgetError(
        f"a budget of {format_bytes(plan.budget.device_bytes or 0)} cannot hold this training: the smallest "
        f"combination, {leanest}, needs {format_bytes(plan.smallest_budget_bytes)}: give --budget "
        f'{budget} or more (in Python budget="{budget}"){lossy_alternatives}{uncut}'
    )


def require_same(plan: Plan, job: Job, source: str) -> Job:
    """Check that a plan is for a job. Return the job, with the plan's budget if the job has no budget.

    The job's texts need not be prepared yet; `plimsoll.planning.plan_validity.require_prepared_for` checks them later.

    Raises:
        InputError: if the plan is for other code, other data, another device or a larger budget; the message names the
            differences.
        BudgetError: if the plan does not fit its budget.
    """
    different = _differences(plan, job, sketch_texts(job))
    if different:
        raise InputError(
            f"the plan {source} does not match the job: {'; '.join(different)}; make a new one with `plimsoll plan`"
        )
    has_bytes, needs_bytes = job.budget.device_bytes, plan.budget.device_bytes
    if has_bytes is not None and needs_bytes is not None and has_bytes < needs_bytes:
        raise InputError(
            f"the plan {source} is for a budget of {format_bytes(needs_bytes)}, and this run has "
            f"{format_bytes(has_bytes)}: give that budget, or make the plan again with `plimsoll plan`"
        )
    require_that_fits(plan)
    return job if has_bytes is not None else job.model_copy(update={"budget": plan.budget})


def without_trial(plan: Plan) -> Plan:
    """Return a plan from a file for a new run, without the measurements of another run's trial."""
    if plan.trial is None:
        return plan
    left_out = Trial(left_out="it is the plan of another run, used unchanged")
    return plan.model_copy(update={"trial": left_out, "candidates": ()})


def reasons_against(plan: Plan, job: Job, texts: TextSketch) -> list[str]:
    """Return the differences between a resumed run and its plan. A plan for a smaller budget is still valid.

    The original texts may have been deleted: ``texts`` are the facts of the prepared texts.
    """
    needs_bytes, has_bytes = plan.budget.device_bytes, job.budget.device_bytes
    if needs_bytes is not None and has_bytes is not None and has_bytes < needs_bytes:
        return [f"the budget was {format_bytes(needs_bytes)}, is {format_bytes(has_bytes)}"]
    return _differences(plan, job, texts)


def _differences(plan: Plan, job: Job, texts: TextSketch) -> list[str]:
    target = CpuLowering().name if choose_device(job) == "cpu" else _cuda_here().lowering().name
    return list(differences(plan.made_for, facts_of(job, texts, target), texts.guessed))


def _cuda_here() -> Target:
    return gpu_target(spec_of(backend_for("cuda").probe()), None)
