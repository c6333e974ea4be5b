"""The user's constraints on a plan: pins from the job or the command line, and forbidden techniques.

They are merged, and impossible constraints are refused before data are prepared. Choices are made elsewhere, in
`plimsoll.planning.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plimsoll.models.assemble import choose_device
from plimsoll.planning.inputs import JobInput, PlanningInput
from plimsoll.planning.search.choices import Problem, available_choices
from plimsoll.planning.search.pins import Decided, decide
from plimsoll.records.job import Job
from plimsoll.records.plan import Pin, parse_pin, without_micro_batch
from plimsoll.techniques import Choices, Setting, technique_of


def with_pins_of(job: Job, pins: Sequence[Pin], forbids: Iterable[str]) -> tuple[Pin, ...]:
    """Merge the job's pins into the given pins, which override the job's for the same technique."""
    said = {*(pin.technique for pin in pins), *forbids}
    own = (parse_pin(text) for text in job.pin)
    return (*pins, *(pin for pin in own if pin.technique not in said))


def require_possible(job: Job, pins: Sequence[Pin], forbids: Iterable[str]) -> None:
    """Check pins and forbidden techniques as far as possible before the data are prepared.

    Raises:
        InputError: see `plan_job`.
    """
    forbidden = tuple(forbids)
    pins = with_pins_of(job, pins, forbidden)
    require_known(pins, forbidden)
    planning_input = JobInput(job)
    decided_of(planning_input, setting_of(planning_input, choose_device(job)), pins, forbidden)


def pinned_choices(job: Job, device: str) -> Choices:
    """Return the choices that the job's pins determine completely, without the micro-batch.

    Raises:
        InputError: see `plan_job`.
    """
    if not job.pin:
        return ()
    pins = with_pins_of(job, (), ())
    require_known(pins, ())
    planning_input = JobInput(job)
    decided = decided_of(planning_input, setting_of(planning_input, device), pins, ())
    return without_micro_batch(decided.pinned)


def decided_of(planning_input: PlanningInput, setting: Setting, pins: Sequence[Pin], forbids: Sequence[str]) -> Decided:
    """Resolve the user's constraints, and check that the choices are compatible, which needs no trace."""
    decided = decide(pins, forbids, planning_input.workload, setting)
    available_choices(Problem(planning_input.workload, setting, 0, decided))
    return decided


def require_known(pins: Sequence[Pin], forbids: Sequence[str]) -> None:
    """Check that the names of techniques exist, before a model is built."""
    for name in (*(pin.technique for pin in pins), *forbids):
        technique_of(name)


def setting_of(planning_input: PlanningInput, device: str) -> Setting:
    """Return the facts that techniques depend on in addition to the workload."""
    return Setting(
        device="cpu" if device == "cpu" else "cuda",
        batch_size=planning_input.batch_size,
        precision=planning_input.precision,  # type: ignore[arg-type]  # a precision that `Setting` allows
        allow=planning_input.allow,
        lengths_vary=planning_input.lengths_vary,
        sequence_length=planning_input.sequence_length,
        num_ranks=planning_input.num_ranks,
        ask_rows=planning_input.ask_rows,
    )
