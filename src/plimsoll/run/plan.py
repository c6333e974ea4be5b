"""The plan of a job: which mix of techniques trains it fastest under its budget, on a device that need not be here.

    plan = plan_job(job, device="rtx3060", limit_bytes=6 << 30)

Every mix that is looked at is the real training step, rehearsed with the techniques installed (`run.rehearse`); the
target's allocators count it, and the model of time takes its ops. Looks are short rehearsals; what is chosen is
rehearsed once more at full length before it is called a plan.

Does NOT look at the texts, and does not train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from plimsoll.assemble import choose_device
from plimsoll.data.sketch import TextSketch, sketch_texts
from plimsoll.device.base import backend_for
from plimsoll.device.gpus import spec_of
from plimsoll.device.speed import measured_speed, speed_of
from plimsoll.errors import BudgetError, InputError
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.predict import Counted
from plimsoll.models.build import build_model, loss_of
from plimsoll.optimizers import build_optimizer
from plimsoll.plan.cost import learned_peak, learned_ratio, step_duration
from plimsoll.plan.facts import differences, facts_of
from plimsoll.plan.look import Look, phase_peaks
from plimsoll.plan.menu import Problem
from plimsoll.plan.pins import Decided, decide
from plimsoll.plan.search import Found, search
from plimsoll.records.comparison import Calibration, Learned
from plimsoll.records.device import Budget
from plimsoll.records.heap import FAST_HEAP
from plimsoll.records.job import Job
from plimsoll.records.plan import Pin, Plan, Rejected, Rung, micro_batch_choice
from plimsoll.records.prediction import Prediction
from plimsoll.records.trace import Trace
from plimsoll.records.units import format_bytes
from plimsoll.run.job_step import subject_of
from plimsoll.run.rehearse import rehearse_job, rehearsed_samples
from plimsoll.run.rungs import samples_of
from plimsoll.run.targets import Target, find_target, gpu_target, job_baseline, started_baseline
from plimsoll.techniques import TECHNIQUES, Choices, Setting
from plimsoll.techniques.heap import heap_rules
from plimsoll.workload import Workload

Progress = Callable[[str], None]

_LOOKS_OFF_SHARE = 0.005  # by which a short rehearsal may say too little
_MOST_ROUNDS = 3  # of searching again, where a plan at full length needs more than at the length it was found with


def plan_job(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    pins: Sequence[Pin] = (),
    forbids: Iterable[str] = (),
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest mix of techniques that trains a job within its budget.

    Args:
        job: what is to be trained.
        device: ``"cpu"``, ``"local"`` or ``"cuda"`` for what is here, or the name of a GPU; ``None`` is the job's.
        limit_bytes: what the training may use; ``None`` is the job's budget, or else all that the device has.
        pins: what the plan must use.
        forbids: names of techniques that the plan must not use.
        calibration: what measured runs have taught (`plimsoll.run.learning`).
        progress: told what is being done.

    Returns:
        a plan; where nothing fits, one whose ``fits`` is False and that says what would.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
        InputError: if a technique does not exist, pins contradict each other, or the model cannot be traced.
    """
    started_seconds = time.perf_counter()
    planner = _Planner(job, device, limit_bytes, calibration, progress or (lambda text: None))
    return planner.plan(decide(pins, tuple(forbids), planner.workload, planner.setting), started_seconds)


def require_that_fits(plan: Plan) -> None:
    """Refuse a plan that no budget holds.

    Raises:
        BudgetError: if it does not fit; it says which budget would, and which lossy techniques.
    """
    if plan.fits:
        return
    assert plan.smallest_budget_bytes is not None
    leanest = " ".join(map(str, plan.choices))
    openings = "".join(
        f"; with {one.choices[-1]}, if `allow: [{one.choices[-1].technique}]` in the job allows it, about "
        f"{format_bytes(one.peak.likely_bytes)} would do"
        for one in plan.openings
        if one.peak is not None
    )
    raise BudgetError(
        f"a budget of {format_bytes(plan.budget.device_bytes or 0)} cannot hold this training: what needs least, "
        f"{leanest}, needs {format_bytes(plan.smallest_budget_bytes)}: give --budget "
        f"{-(-plan.smallest_budget_bytes >> 20)}MiB or more{openings}"
    )


def require_same(plan: Plan, job: Job, source: str) -> Job:
    """Check that a plan is of a job, and return the job with the plan's budget where it has none of its own.

    Raises:
        InputError: if the plan is of other code, data, another device or a larger budget; it says what differs.
    """
    texts = sketch_texts(job)
    target = CpuLowering().name if choose_device(job) == "cpu" else _cuda_here().lowering().name
    different = list(differences(plan.made_for, facts_of(job, texts, target)))
    if different:
        raise InputError(
            f"the plan {source} is of another training: {'; '.join(different)}; make it again with `plimsoll plan`"
        )
    has_bytes, needs_bytes = job.budget.device_bytes, plan.budget.device_bytes
    if has_bytes is not None and needs_bytes is not None and has_bytes < needs_bytes:
        raise InputError(
            f"the plan {source} is for a budget of {format_bytes(needs_bytes)}, and this run has "
            f"{format_bytes(has_bytes)}: give that budget, or make the plan again with `plimsoll plan`"
        )
    require_that_fits(plan)
    return job if has_bytes is not None else job.model_copy(update={"budget": plan.budget})


def _cuda_here() -> Target:
    return gpu_target(spec_of(backend_for("cuda").probe()), None)


@dataclass
class _Planner:
    """Looks at mixes of one job on one target; each is traced once."""

    job: Job
    device: str | None
    limit_bytes: int | None
    calibration: Calibration | None
    progress: Progress
    _traced: dict[tuple[Choices, bool], Trace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts = sketch_texts(self.job)
        name = choose_device(self.job) if self.device is None else self.device
        baseline = None
        if name == "cpu":
            baseline = started_baseline(self.job)  # it takes seconds, as the first trace does
            self._trace_for(CpuLowering(), self._plain, is_short=True)
        budget_bytes = self.limit_bytes if self.limit_bytes is not None else self.job.budget.device_bytes
        self.target: Target = find_target(name, budget_bytes, baseline or (lambda: job_baseline(self.job)))
        self.target.calibration = self.calibration
        self.kept_back_bytes = 0 if budget_bytes is None else budget_bytes - self.target.limit_bytes
        self.budget = Budget(device_bytes=budget_bytes, host_bytes=self.job.budget.host_bytes)
        self.workload = _workload_on_meta(self.job, self.texts)
        self.setting = Setting(
            device="cpu" if self.target.spec is None else "cuda",
            batch_size=self.job.batch_size,
            precision=self.job.precision,
            allow=frozenset(self.job.allow),
            lengths_vary=self.job.task == "classification",
        )
        self.speed = measured_speed(self.progress) if self.target.spec is None else speed_of(self.target.spec)

    def plan(self, decided: Decided, started_seconds: float) -> Plan:
        """Search, check at full length, and search again with less room where that does not hold."""
        limit_bytes = int(self.target.limit_bytes * (1 - _LOOKS_OFF_SHARE))
        setting = replace(self.setting, trace=self._trace_for(self.target.lowering(), self._plain, is_short=True))
        for _ in range(_MOST_ROUNDS):
            problem = Problem(self.workload, setting, limit_bytes, decided)
            found = search(problem, lambda choices: self.look(choices, is_short=True))
            self.progress(f"checking {' '.join(map(str, found.chosen.choices))}")
            chosen = self.look(found.chosen.choices, is_short=False)
            over_bytes = chosen.need_bytes - self.target.limit_bytes
            if not found.fits or over_bytes <= 0:
                break
            limit_bytes -= over_bytes
        return self._record(found, (chosen, *found.fallbacks), decided, started_seconds)

    def look(self, choices: Choices, is_short: bool) -> Look:
        """Trace a mix and say what it needs and takes."""
        counted = self._count(choices, is_short)
        micro_batch = samples_of(choices)
        duration = step_duration(
            counted.trace,
            self.speed,
            batch_size=self.job.batch_size,
            micro_batch=micro_batch,
            rehearsed_samples=rehearsed_samples(self.job.batch_size, micro_batch),
            heap=heap_rules(choices) or FAST_HEAP,
            learned=self._learned(choices),
        )
        return Look(
            choices, micro_batch, counted.peak, counted.oom_row is None, duration, phase_peaks(counted), counted.parts()
        )

    @property
    def _plain(self) -> Choices:
        return (micro_batch_choice(self.job.batch_size),)

    def _learned(self, choices: Choices) -> Learned | None:
        if self.calibration is None:
            return None
        names = [choice.technique for choice in choices]
        return learned_ratio(self.calibration, self.target.lowering().name, names)

    def _trace_for(self, lowering: Lowering, choices: Choices, is_short: bool) -> Trace:
        seen = tuple(choice for choice in choices if choice.technique != "heap")  # which changes no op
        if (seen, is_short) not in self._traced:
            self.progress(f"tracing {' '.join(map(str, choices))}")
            self._traced[seen, is_short] = rehearse_job(self.job, self.texts, lowering, seen, is_short=is_short)
        return self._traced[seen, is_short]

    def _count(self, choices: Choices, is_short: bool) -> Counted:
        lowering, names = self.target.lowering(), [choice.technique for choice in choices]
        counted = self.target.count(self._trace_for(lowering, choices, is_short), heap_rules(choices))
        learned = learned_peak(self.calibration, lowering.name, names) if self.calibration else None
        return replace(counted, learned=learned) if learned else counted

    def _record(self, found: Found, rungs: Sequence[Look], decided: Decided, started_seconds: float) -> Plan:
        names = {choice.technique for look in (*rungs, *found.openings) for choice in look.choices}
        names |= {choice.technique for one in found.rejected for choice in one.choices}
        learned = self._learned(rungs[0].choices)
        smallest_bytes = None if found.fits else rungs[0].need_bytes + self.kept_back_bytes
        return Plan(
            budget=self.budget,
            rungs=_ladder(rungs),
            limit_bytes=self.target.limit_bytes,
            plain=found.plain.rung(),
            rejected=found.rejected,
            openings=tuple(_opening(look) for look in found.openings),
            smallest_budget_bytes=smallest_bytes,
            prediction=self._prediction(rungs[0].choices),
            pinned=decided.pinned,
            forbidden=tuple(sorted(decided.forbidden)),
            about={name: TECHNIQUES[name].summary for name in sorted(names)},
            numerics={name: TECHNIQUES[name].numerics for name in sorted(names)},
            time_factor=learned.mean if learned else 1.0,
            made_for=facts_of(self.job, self.texts, self.target.lowering().name),
            num_traces=len(self._traced),
            plan_seconds=time.perf_counter() - started_seconds,
        )

    def _prediction(self, choices: Choices) -> Prediction:
        job, counted = self.job, self._count(choices, is_short=False)
        precision = next(
            (str(one.options["dtype"]) for one in choices if one.technique == "autocast"), job.own_precision
        )
        subject = subject_of(job, precision)
        return self.target.predict(
            counted, subject, precision, samples_of(choices), job.sequence_length, job.batch_size
        )


def _ladder(rungs: Sequence[Look]) -> tuple[Rung, ...]:
    """The rungs whose needs fall, and below the last one its halves down to single samples."""
    kept = [rungs[0]]
    kept += [look for before, look in pairwise(rungs) if look.need_bytes < before.need_bytes]
    last = kept[-1].choices
    halves = []
    size = samples_of(last)
    while size > 1:
        size = -(-size // 2)
        halves.append(Rung(choices=(micro_batch_choice(size), *last[1:])))
    return (*(look.rung() for look in kept), *halves)


def _opening(look: Look) -> Rejected:
    return Rejected(choices=look.choices, reason="is not allowed", peak=look.peak, step_time=look.step_time)


def _workload_on_meta(job: Job, texts: TextSketch) -> Workload:
    """The training with shapes only: what techniques look at to say what they can do."""
    model = build_model(job, texts.vocab_size, texts.num_labels, texts.end_id, device="meta").train()
    loss, units = loss_of(job.task)
    return Workload(
        model,
        build_optimizer(job.optimizer, model.parameters()),
        loss,
        units,
        clip_norm=job.optimizer.clip_norm,
        precision="fp32" if job.precision == "auto" else job.precision,
        device=torch.device("meta"),
    )
