"""What the user has decided of a plan: pins, of the job or given, and what is forbidden.

Covers joining them, refusing what cannot be before anything is prepared, and what they decide wholly. Does NOT choose
anything: see `plimsoll.planning.plan`.
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
    """Join the job's own pins to those that are given, which come before what the job says of the same technique."""
    said = {*(pin.technique for pin in pins), *forbids}
    own = (parse_pin(text) for text in job.pin)
    return (*pins, *(pin for pin in own if pin.technique not in said))


def require_possible(job: Job, pins: Sequence[Pin], forbids: Iterable[str]) -> None:
    """Refuse what can be told to be wrong with pins and what is forbidden, before the data are prepared.

    Raises:
        InputError: see `plan_job`.
    """
    forbidden = tuple(forbids)
    pins = with_pins_of(job, pins, forbidden)
    require_known(pins, forbidden)
    planning_input = JobInput(job)
    decided_of(planning_input, setting_of(planning_input, choose_device(job)), pins, forbidden)


def pinned_choices(job: Job, device: str) -> Choices:
    """Return what the job's own pins say wholly, a micro-batch left out: what they leave open, a plan decides.

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
    """Resolve what the user has decided; that the choices go together needs no trace either."""
    decided = decide(pins, forbids, planning_input.workload, setting)
    available_choices(Problem(planning_input.workload, setting, 0, decided))
    return decided


def require_known(pins: Sequence[Pin], forbids: Sequence[str]) -> None:
    """Refuse names of techniques that there are not, before a model is built."""
    for name in (*(pin.technique for pin in pins), *forbids):
        technique_of(name)


def setting_of(planning_input: PlanningInput, device: str) -> Setting:
    """Return what techniques are asked for, beside the training itself."""
    return Setting(
        device="cpu" if device == "cpu" else "cuda",
        batch_size=planning_input.batch_size,
        precision=planning_input.precision,  # type: ignore[arg-type]  # it is one of them
        allow=planning_input.allow,
        lengths_vary=planning_input.lengths_vary,
        sequence_length=planning_input.sequence_length,
        num_ranks=planning_input.num_ranks,
        ask_rows=planning_input.ask_rows,
    )
