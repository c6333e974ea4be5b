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
from plimsoll.plan.cost import learned_ratio, step_duration
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
from plimsoll.records.prediction import Estimate, Prediction
from plimsoll.records.trace import Trace
from plimsoll.records.units import format_bytes
from plimsoll.run.job_step import subject_of
from plimsoll.run.rehearse import rehearse_job, rehearsed_samples
from plimsoll.run.rungs import samples_of
from plimsoll.run.targets import Target, find_target, gpu_target, started_baseline
from plimsoll.techniques import TECHNIQUES, Choices, Setting, technique_of
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
        calibration: what measured runs have taught (`plimsoll.memory.compare.calibrate`).
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
    texts = sketch_texts(job)
    name = choose_device(job) if device is None else device.lower()
    asked = _Asked.of(job, texts, name, pins, tuple(forbids))  # before anything that takes time
    return _Planner(job, texts, name, asked, limit_bytes, calibration, progress or (lambda text: None)).plan(
        started_seconds
    )


def require_possible(job: Job, pins: Sequence[Pin], forbids: Iterable[str]) -> None:
    """Refuse what can be told to be wrong with pins and what is forbidden, before the data are prepared.

    Raises:
        InputError: see `plan_job`.
    """
    _Asked.of(job, sketch_texts(job), choose_device(job), pins, tuple(forbids))


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
        f"; with {choice}, if `allow: [{choice.technique}]` in the job allows it, about "
        f"{format_bytes(one.peak.likely_bytes)} would do"
        for one in plan.openings
        for choice in one.choices
        if one.peak is not None and choice not in plan.choices
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


@dataclass(frozen=True)
class _Asked:
    """A training with shapes only, and what the user has decided of its plan."""

    workload: Workload
    setting: Setting
    decided: Decided

    @classmethod
    def of(cls, job: Job, texts: TextSketch, device: str, pins: Sequence[Pin], forbids: Sequence[str]) -> _Asked:
        """Ask the techniques what of it is possible."""
        for name in (*(pin.technique for pin in pins), *forbids):
            technique_of(name)
        is_on_cpu = device == "cpu" or (device == "local" and not torch.cuda.is_available())
        setting = Setting(
            device="cpu" if is_on_cpu else "cuda",
            batch_size=job.batch_size,
            precision=job.precision,
            allow=frozenset(job.allow),
            lengths_vary=job.task == "classification",
        )
        workload = _workload_on_meta(job, texts)
        return cls(workload, setting, decide(pins, forbids, workload, setting))


@dataclass
class _Planner:
    """Looks at mixes of one job on one target; each is traced once."""

    job: Job
    texts: TextSketch
    device: str
    asked: _Asked
    limit_bytes: int | None
    calibration: Calibration | None
    progress: Progress
    _traced: dict[tuple[Choices, bool], Trace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        budget_bytes = self.limit_bytes if self.limit_bytes is not None else self.job.budget.device_bytes
        self.target: Target = find_target(self.device, budget_bytes, self._baseline)
        self.target.calibration = self.calibration
        self.budget = Budget(device_bytes=budget_bytes, host_bytes=self.job.budget.host_bytes)
        self.speed = measured_speed(self.progress) if self.target.spec is None else speed_of(self.target.spec)

    def _baseline(self) -> Estimate:
        answer = started_baseline(self.job)  # it takes seconds, as the first trace does
        self._trace_for(CpuLowering(), self._plain, is_short=True)
        return answer()

    def plan(self, started_seconds: float) -> Plan:
        """Find what fits, or what needs least and the budget in which something is found."""
        found, chosen = self._found()
        smallest_bytes = None if found.fits else self._smallest_bytes(chosen.need_bytes)
        return self._record(found, (chosen, *found.fallbacks), smallest_bytes, started_seconds)

    def _found(self) -> tuple[Found, Look]:
        """Search, check at full length, and search again with less room where that does not hold."""
        limit_bytes = int(self.target.limit_bytes * (1 - _LOOKS_OFF_SHARE))
        plain = self._trace_for(self.target.lowering(), self._plain, is_short=True)
        setting = replace(self.asked.setting, trace=plain)
        for _ in range(_MOST_ROUNDS):
            problem = Problem(self.asked.workload, setting, limit_bytes, self.asked.decided)
            found = search(problem, lambda choices: self.look(choices, is_short=True))
            self.progress(f"checking {' '.join(map(str, found.chosen.choices))}")
            chosen = self.look(found.chosen.choices, is_short=False)
            over_bytes = chosen.need_bytes - self.target.limit_bytes
            if not found.fits or over_bytes <= 0:
                break
            limit_bytes -= over_bytes
        return replace(found, fits=chosen.fits and over_bytes <= 0), chosen

    def _smallest_bytes(self, need_bytes: int) -> int:
        """The least limit from ``need_bytes`` on in which a plan is found: with another limit a search looks elsewhere."""
        target = self.target
        try:
            for _ in range(_MOST_ROUNDS):
                self.target = replace(target, limit_bytes=need_bytes)
                found, chosen = self._found()
                if found.fits:
                    break
                need_bytes = max(chosen.need_bytes, int(need_bytes * (1 + _LOOKS_OFF_SHARE)))
        finally:
            self.target = target
        return need_bytes

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
        return self.target.count(self._trace_for(self.target.lowering(), choices, is_short), heap_rules(choices))

    def _record(self, found: Found, rungs: Sequence[Look], smallest_bytes: int | None, started_seconds: float) -> Plan:
        names = {choice.technique for look in (*rungs, *found.openings) for choice in look.choices}
        names |= {choice.technique for one in found.rejected for choice in one.choices}
        return Plan(
            budget=self.budget,
            rungs=_ladder(rungs),
            limit_bytes=self.target.limit_bytes,
            plain=found.plain.rung(),
            rejected=found.rejected,
            openings=() if found.fits else tuple(_opening(look) for look in found.openings),
            smallest_budget_bytes=None if smallest_bytes is None else smallest_bytes + self.target.kept_back_bytes,
            prediction=self._prediction(rungs[0].choices),
            pinned=self.asked.decided.pinned,
            forbidden=tuple(sorted(self.asked.decided.forbidden)),
            about={name: TECHNIQUES[name].summary for name in sorted(names)},
            numerics={name: TECHNIQUES[name].numerics for name in sorted(names)},
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
