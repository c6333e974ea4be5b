"""A comparison of two runs: measurements, the peaks that their plans predicted, and the differences of their jobs.

Categories, modules and lines are from the prediction of each plan, because a run measures only the total memory in
use. Does NOT judge which run is better. If the tasks of the runs differ, the comparison only names this difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.run import RunRecord
from plimsoll.records.trace import Category


class Place(Frozen):
    """The bytes of one category that one module or line of user code has allocated, at the predicted peak.

    An unknown module or line is "".
    """

    category: Category
    module: str
    line: str
    num_bytes: int


class RunSide(Frozen):
    """One run of a comparison.

    ``choices`` are the techniques of the plan, and ``last_choices`` the techniques in use at the end of the run.
    ``steps``, ``losses`` and ``peaks_bytes`` are columns with a row for each completed step. ``step_seconds`` and
    ``units_per_second`` leave out the first step (warm-up) if more steps have completed. ``parts`` and ``places``
    describe the peak that the plan predicts for its first configuration. ``parts`` has all bytes by category.
    ``places`` has the largest allocations by category, module and line. Both are empty without a prediction.
    """

    name: str
    status: str
    device: str
    unit: Literal["samples", "tokens"]
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    step_seconds: float | None = None
    units_per_second: float | None = None
    validation_loss: float | None = None
    choices: tuple[str, ...] = ()
    last_choices: tuple[str, ...] = ()
    num_oom_events: int = 0
    num_oom_survived: int = 0
    num_deaths: int = 0
    steps: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    peaks_bytes: tuple[int | None, ...] = ()
    parts: dict[Category, int] = {}
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, run: RunRecord) -> RunSide:
        """Return the measurements and predictions of a run that a comparison needs."""
        steps = run.finished_steps
        counted = steps[1:] or steps
        seconds = sum(line.step_seconds for line in counted)
        prediction = run.plan.prediction
        return cls(
            name=run.name,
            status=run.status,
            device=run.device.name,
            unit=run.unit_name,
            peak_bytes=run.peak_bytes,
            limit_bytes=run.limit_bytes,
            predicted_peak_bytes=prediction.peak.likely_bytes if prediction else None,
            step_seconds=seconds / len(counted) if counted else None,
            units_per_second=sum(line.num_units for line in counted) / seconds if seconds else None,
            validation_loss=run.evaluations[-1].loss if run.evaluations else None,
            choices=_choices(run, 0),
            last_choices=_choices(run, steps[-1].fallback if steps else 0),
            num_oom_events=len(run.oom_events),
            num_oom_survived=sum(event.survived for event in run.oom_events),
            num_deaths=len(run.deaths),
            steps=tuple(line.step for line in steps),
            losses=tuple(line.loss for line in steps),
            peaks_bytes=tuple(line.peak_bytes for line in steps),
            parts=prediction.parts if prediction else {},
            places=_places(run),
        )


class JobDifference(Frozen):
    """A field of the job, by its dotted name, that differs between the runs. ``None``: the job does not set it."""

    field: str
    first: Any
    second: Any


class RunComparison(Record):
    """A comparison of two runs, in the given order. ``job`` lists the fields of the jobs that differ."""

    record_kind: ClassVar[str] = "run-comparison"

    first: RunSide
    second: RunSide
    job: tuple[JobDifference, ...] = ()

    @classmethod
    def of(cls, first: RunRecord, second: RunRecord) -> RunComparison:
        """Compare two runs, finished or not."""
        fields, others = dict(_fields(first.job)), dict(_fields(second.job))
        differing = [name for name in {**fields, **others} if fields.get(name) != others.get(name)]
        job = (JobDifference(field=name, first=fields.get(name), second=others.get(name)) for name in differing)
        return cls(first=RunSide.of(first), second=RunSide.of(second), job=tuple(job))


def _choices(run: RunRecord, fallback: int) -> tuple[str, ...]:
    return tuple(map(str, run.plan.fallbacks[fallback].choices)) if fallback < len(run.plan.fallbacks) else ()


def _places(run: RunRecord) -> tuple[Place, ...]:
    """Return the largest allocations at the predicted peak, added up by category, module and line, largest first."""
    counted: Counter[tuple[Category, str, str]] = Counter()
    for holding in run.plan.prediction.largest if run.plan.prediction else ():
        counted[holding.category, holding.name or holding.made.module, holding.made.line] += holding.num_bytes
    return tuple(
        Place(category=category, module=module, line=line, num_bytes=num_bytes)
        for (category, module, line), num_bytes in counted.most_common()
    )


def _fields(value: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _fields(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}", inner
