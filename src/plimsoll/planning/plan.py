"""The planner: finds the fastest combination of techniques that trains a job or model within a budget.

    plan = plan_job(job, device="rtx3060", limit_bytes=6 << 30)
    plan = plan_step(model, optimizer, batch, units="next-tokens", budget="2GiB")

The target device need not be present. Each evaluation is a dry run of the real training step with the techniques
installed (`plimsoll.planning.dry_run`). A model of the target's allocators predicts the peak, and the time model the
step time. Evaluations during the search are short dry runs of two steps. If the training runs evaluations between
steps, the chosen combination is dry-run again at full length, with an evaluation.

Does not read the texts, and does not train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from plimsoll.data.batch import Units
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.collective_speed import exchange_of, measured_exchange
from plimsoll.device.disk import disk_bytes_per_second
from plimsoll.device.mapped_memory import scratch_folder
from plimsoll.device.speed import measured_speed, speed_of
from plimsoll.errors import OutputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.predict import Counted
from plimsoll.models.assemble import choose_device
from plimsoll.models.workload import LossFunction, Reason, model_loss
from plimsoll.planning.baseline import StartedBaseline
from plimsoll.planning.cached_baseline import Baseline, cached_baseline
from plimsoll.planning.constraints import decided_of, setting_of, with_pins_of
from plimsoll.planning.dry_run.processes import Asked
from plimsoll.planning.dry_run.ranks import threads_of_rank
from plimsoll.planning.dry_run.step import dry_run_samples
from plimsoll.planning.inputs import JobInput, PlanningInput, StepInput, allowed
from plimsoll.planning.job_checks import require_sound
from plimsoll.planning.search.choices import Problem
from plimsoll.planning.search.evaluation import Evaluation, Found, phase_peaks
from plimsoll.planning.search.prefetch import Likely
from plimsoll.planning.search.reasons import told_of
from plimsoll.planning.search.search import search
from plimsoll.planning.search.time_model import (
    learned_peak,
    learned_ratio,
    moved_outside,
    step_duration,
    update_seconds,
    with_disk,
)
from plimsoll.planning.targets import Target, device_here, find_target
from plimsoll.records.comparison import Calibration, Learned
from plimsoll.records.device import Budget
from plimsoll.records.job import Job
from plimsoll.records.plan import (
    Candidate,
    Configuration,
    LossCheck,
    OffDevice,
    Pin,
    Plan,
    Rejected,
    micro_batch_choice,
    parse_pin,
    without_micro_batch,
)
from plimsoll.records.prediction import Estimate, Prediction
from plimsoll.records.trace import Trace
from plimsoll.records.units import parse_bytes
from plimsoll.step.fallbacks import samples_of
from plimsoll.techniques import TECHNIQUES, Choices, in_order, technique_of

Progress = Callable[[str], None]

# On the CPU. The positions of freed blocks in the heap differ from step to step. Measured in six steps of small GPT-2,
# BERT and LSTM models with micro-batches of 1 to 11 samples: the highest peak was up to 17 % above the peak of a short
# dry run, see docs/LOG.md.
_LONG_RUN_SPREAD = 0.15
_SHORT_DRY_RUN_OFF_SHARE = 0.005  # share by which a short dry run may underestimate the peak
_LEAST_OFF_BYTES = 64 << 20
_MOST_ROUNDS = 3  # of searching again, if a plan needs more at full length than in a short dry run


def plan_job(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    pins: Sequence[Pin] = (),
    forbids: Iterable[str] = (),
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    started: Baseline | None = None,
    texts: TextSketch | None = None,
) -> Plan:
    """Find the fastest combination of techniques that trains a job within its budget.

    Args:
        job: the training to plan.
        device: ``"cpu"``, ``"local"`` or ``"cuda"`` for a device of this machine, or the name of a GPU. ``None`` uses
            the job's device.
        limit_bytes: budget in bytes. ``None`` uses the job's budget, or the whole device if the job has no budget.
        pins: choices that the plan must use.
        forbids: names of techniques that the plan must not use.
        calibration: correction factors learned from measured runs (`plimsoll.planning.calibration`).
        progress: called with a message for each stage of the work.
        started: a running measurement of the process's baseline, to share among several plans for the CPU. ``None``
            starts a measurement.
        texts: facts of the prepared data (`plimsoll.data.quick_facts.texts_of`), so that the plan is for exactly the
            training that is built. ``None`` sketches them from the files.

    Returns:
        a plan. If nothing fits, its ``fits`` is False, and it has the smallest sufficient budget.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
        InputError: if a technique does not exist, pins contradict each other, or the model cannot be traced.
    """
    constraints = (with_pins_of(job, pins, forbids), tuple(forbids))
    with planner_of(job, device, limit_bytes, constraints, calibration, progress, started, texts) as planner:
        return planner.plan()


@contextmanager
def planner_of(  # noqa: PLR0917 -- called twice
    job: Job,
    device: str | None,
    limit_bytes: int | None,
    constraints: tuple[Sequence[Pin], Sequence[str]],
    calibration: Calibration | None,
    progress: Progress | None,
    started: Baseline | None = None,
    texts: TextSketch | None = None,
) -> Iterator[Planner]:
    """Yield a planner that evaluates combinations of a job. For the arguments and exceptions see `plan_job`."""
    budget_bytes = limit_bytes if limit_bytes is not None else job.budget.device_bytes
    budget = Budget(device_bytes=budget_bytes, host_bytes=job.budget.host_bytes)
    pins, forbids = constraints
    require_sound(job, device, limit_bytes, pins, forbids, has_data=False)
    name = device_of_job(job, device)
    with ExitStack() as stack:
        stack.enter_context(threads_of_rank(job.ranks))
        if name == "cpu" and started is None:
            started = stack.enter_context(cached_baseline(job, lambda: StartedBaseline(job)))  # takes seconds to start
        planning_input = JobInput(job, started, texts)
        stack.enter_context(planning_input.traced_apart())
        yield Planner(planning_input, name, budget, pins, forbids, calibration, progress or (lambda text: None))


def device_of_job(job: Job, device: str | None) -> str:
    """Return the name of the device that a job is planned for; see `plan_job`."""
    return choose_device(job) if device is None else device_here(device)


def plan_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: LossFunction = model_loss,
    *,
    budget: str | int,
    units: Units | None = None,
    clip_norm: float | None = None,
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32",
    allow: Iterable[str] = (),
    never_cut: bool = False,
    loss_check: LossCheck | None = None,
    device: str = "local",
    pins: Sequence[str] = (),
    forbids: Sequence[str] = (),
    calibration: Calibration | None = None,
) -> Plan:
    """Find the fastest combination of techniques for training with `TrainStep` in a user's program.

        plan = plan_step(model, optimizer, batch, units="next-tokens", budget="2GiB")
        step = TrainStep(model, optimizer, units="next-tokens", fallbacks=plan.fallbacks)

    Args:
        model: the model. It is not changed, and its parameters need no memory (they may be on the meta device).
        optimizer: the optimizer of the model.
        batch: one batch of the largest size that the training will use, on the CPU.
        loss: see `TrainStep`, also for ``units``, ``clip_norm`` and ``precision``. ``precision="auto"`` leaves the
            precision to the plan.
        budget: device memory that the process may use, such as ``"2GiB"``.
        units: see `loss`.
        clip_norm: see `loss`.
        precision: see `loss`.
        allow: names of lossy techniques that the plan may use. ``"recut_loss"`` allows micro-batches even if the loss
            is not shown to be the sum of the losses of its micro-batches.
        never_cut: never split the batch into micro-batches.
        loss_check: an earlier result of the check whether the batch may be split (``step.additivity.found``). ``None``
            runs the check.
        device: ``"cpu"``; ``"local"``, the GPU of this machine or else its CPU; ``"cuda"``; or a GPU's name.
        pins: choices that the plan must use, such as ``"checkpointing=all"``.
        forbids: names of techniques that the plan must not use.
        calibration: correction factors learned from measured runs (`plimsoll.planning.calibration`).

    Returns:
        a plan. If nothing fits, its ``fits`` is False, and it has the smallest sufficient budget.

    Raises:
        InputError: if the model fails or cannot be traced, a technique does not exist, or pins contradict each other.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
    """
    planning_input = StepInput(
        model, optimizer, batch, loss, units, clip_norm, precision, allowed(allow), never_cut, loss_check
    )
    pinned = [parse_pin(pin) for pin in pins]
    limit = Budget(device_bytes=parse_bytes(budget))
    return Planner(
        planning_input, device_here(device), limit, pinned, tuple(forbids), calibration, lambda text: None
    ).plan()


class Planner:
    """Evaluator of combinations for one training run on one target. Each combination is traced once.

    ``planning_input`` describes the training, and ``setting`` the facts about it that techniques depend on.
    """

    def __init__(  # noqa: PLR0917 -- called here only
        self,
        planning_input: PlanningInput,
        device: str,
        budget: Budget,
        pins: Sequence[Pin],
        forbids: Sequence[str],
        calibration: Calibration | None,
        progress: Progress,
    ) -> None:
        self._started_seconds = time.perf_counter()
        self.planning_input, self._budget = planning_input, budget
        self._calibration, self._progress = calibration, progress
        self._traced: dict[tuple[Choices, bool], Trace] = {}
        self.loss_check = planning_input.loss_check()
        if not self.loss_check.may_cut:
            planning_input.workload.kept_whole = Reason(self.loss_check.why, self.loss_check.remedy)
        self.setting = setting_of(planning_input, device)
        self._is_short = not planning_input.evaluates_between_steps
        self._decided = decided_of(planning_input, self.setting, pins, forbids)
        self._target: Target = find_target(device, budget.device_bytes, self._baseline)
        self._target.calibration = calibration
        spec, num_ranks = self._target.spec, planning_input.num_ranks
        self._speed = measured_speed(progress) if spec is None else speed_of(spec)
        self._exchange = None
        if num_ranks > 1:
            self._exchange = measured_exchange(num_ranks, progress) if spec is None else exchange_of(spec, num_ranks)

    def _baseline(self) -> Estimate:
        self._trace_plainly(CpuLowering())  # while the baseline process runs
        return self.planning_input.baseline()

    def plan(self) -> Plan:
        """Return the fastest plan that fits; if none fits, the leanest plan with the smallest sufficient budget."""
        found, chosen = self._found()
        if self._has_grown():
            found, chosen = self._found()
        smallest_bytes = None if found.fits else self._smallest_bytes(chosen.need_bytes)
        return self._record(found, (chosen, *found.fallbacks), smallest_bytes)

    def _has_grown(self) -> bool:
        """Return whether the planner's imports and caches have enlarged this process since its baseline was measured.

        This matters only for a plan for this process (`plan_step`), whose baseline is then too small.
        """
        if self._target.baseline is None:
            return False
        now = self.planning_input.baseline()
        grown_bytes = now.likely_bytes - self._target.baseline.likely_bytes
        self._target = replace(self._target, baseline=now)
        return grown_bytes > 0

    def _trace_plainly(self, lowering: Lowering) -> Trace:
        """Trace the whole batch with the pins only. Begin a trace of the smallest micro-batch in a worker process."""
        whole = self.plain_choices
        if (_seen_in_trace(whole), True) not in self._traced:
            smallest = in_order((micro_batch_choice(1), *without_micro_batch(whole)))
            self.planning_input.tracers.suppose([Asked(lowering, _seen_in_trace(smallest), is_short=True)])
        return self._trace(lowering, whole, is_short=True)

    @property
    def limit_bytes(self) -> int:
        """Upper bound in bytes for the memory that a combination may need."""
        return self._target.limit_bytes

    def problem(self, limit_bytes: int) -> Problem:
        """Return the search problem for a limit of ``limit_bytes``."""
        trace = self._trace_plainly(self._target.lowering())
        setting, margin_bytes = replace(self.setting, trace=trace), self.limit_bytes - limit_bytes
        once_seconds = update_seconds(self._count(self.plain_choices, True, False), self._speed, self._exchange)
        return Problem(self.planning_input.workload, setting, limit_bytes, self._decided, margin_bytes, once_seconds)

    def _found(self) -> tuple[Found, Evaluation]:
        """Search, and verify the result at full length.

        If the result exceeds the limit, search again with a lower limit. If every search fails, take a fallback that
        fits.
        """
        limit_bytes = int(self._target.limit_bytes * (1 - _SHORT_DRY_RUN_OFF_SHARE))
        for _ in range(_MOST_ROUNDS):
            problem = self.problem(limit_bytes)
            found = search(
                problem, partial(self.evaluate, is_short=True), self._expect, self.evaluate_at_length, self._suppose
            )
            chosen = self.evaluate_at_length(found.chosen.choices)
            over_bytes = chosen.need_bytes - self._target.limit_bytes
            if not found.fits or over_bytes <= 0:
                break
            limit_bytes -= over_bytes
        else:  # each round chose another combination that was slightly over the limit; the fallbacks need less
            for number, evaluation in enumerate(found.fallbacks, 1):
                smaller = self.evaluate_at_length(evaluation.choices)
                if smaller.fits and smaller.need_bytes <= self._target.limit_bytes:
                    return replace(found, fallbacks=found.fallbacks[number:]), smaller
        return replace(found, fits=chosen.fits and over_bytes <= 0), chosen

    def _smallest_bytes(self, need_bytes: int) -> int:
        """Return the smallest limit in bytes for which a search found a plan, starting from ``need_bytes``.

        The search is repeated, because a different limit can lead it to a different combination.
        """
        target = self._target
        try:
            for _ in range(_MOST_ROUNDS):
                self._target = replace(target, limit_bytes=need_bytes)
                found, chosen = self._found()
                if found.fits:
                    break
                need_bytes = max(chosen.need_bytes, int(need_bytes * (1 + _SHORT_DRY_RUN_OFF_SHARE)))
        finally:
            self._target = target
        return need_bytes

    def evaluate_at_length(self, choices: Choices) -> Evaluation:
        """Evaluate a combination over enough steps to include everything that the training does."""
        return self.evaluate(choices, self._is_short, is_long=True)

    def evaluate(self, choices: Choices, is_short: bool, is_long: bool = False) -> Evaluation:
        """Trace a combination, and predict its peak and step time.

        ``is_short`` is as in `dry_run_job`. With ``is_long``, more steps are simulated in the heap (see
        `count_on_cpu`).
        """
        counted = self._count(choices, is_short, is_long)
        micro_batch = samples_of(choices)
        duration = step_duration(
            counted,
            self._speed,
            batch_size=self.planning_input.batch_size,
            micro_batch=micro_batch,
            dry_run_samples=dry_run_samples(self.planning_input.batch_size, micro_batch),
            learned=self._learned(choices),
            exchange=self._exchange,
        )
        off = self._off_device(counted, micro_batch)
        if off is not None and off.disk_bytes_per_second is not None:
            duration = with_disk(duration, off.moved_bytes, off.disk_bytes_per_second)
        return Evaluation(
            choices, micro_batch, counted.peak, counted.oom_row is None, duration, phase_peaks(counted), counted.parts()
        )

    def _off_device(self, counted: Counted, micro_batch: int) -> OffDevice | None:
        """Return the memory that a combination uses outside its budget; ``None`` if this memory is negligible.

        On a CPU, the result includes the disk's speed if the offloaded files do not fit in memory.
        """
        kept_bytes = live_bytes(counted.trace, on_host=True).peak_bytes
        if kept_bytes < _LEAST_OFF_BYTES:
            return None
        batch_size = self.planning_input.batch_size
        moved_bytes = moved_outside(
            counted,
            batch_size=batch_size,
            micro_batch=micro_batch,
            dry_run_samples=dry_run_samples(batch_size, micro_batch),
        )
        is_too_large = kept_bytes > self._target.capacity_bytes - counted.peak.likely_bytes
        rate = self._disk_rate if self._target.spec is None and is_too_large else None
        return OffDevice(kept_bytes=kept_bytes, moved_bytes=moved_bytes, disk_bytes_per_second=rate)

    @cached_property
    def _disk_rate(self) -> float | None:
        self._progress("measuring the disk, because the offloaded files are larger than the free memory")
        with suppress(OSError, OutputError):  # the training itself will report the problem
            return disk_bytes_per_second(scratch_folder())
        return None

    @property
    def plain_choices(self) -> Choices:
        """The choices for the whole batch with all pins.

        Pins are included because some models cannot train without them, for example on sequences too long for cuDNN.
        """
        return in_order(
            (*without_micro_batch(self._decided.pinned), micro_batch_choice(self.planning_input.batch_size))
        )

    def _learned(self, choices: Choices) -> Learned | None:
        if self._calibration is None:
            return None
        names = [choice.technique for choice in choices]
        return learned_ratio(self._calibration, self._target.lowering().name, names)

    def _expect(self, combinations: Iterable[Choices]) -> None:
        """Begin the short traces that are certain to be requested, except the first: this process makes it itself."""
        self.planning_input.tracers.expect(list(self._untraced((choices, False) for choices in combinations))[1:])

    def _suppose(self, combinations: Iterable[Likely]) -> None:
        """Begin traces that may be requested, one trace for each idle worker process."""
        self.planning_input.tracers.suppose(self._untraced(combinations))

    def _untraced(self, combinations: Iterable[Likely]) -> Iterator[Asked]:
        for choices, at_length in combinations:
            asked = Asked(self._target.lowering(), _seen_in_trace(choices), is_short=not at_length)
            is_shown = at_length and self._is_short  # without evaluations, a short trace is enough
            if not is_shown and (asked.choices, asked.is_short) not in self._traced:
                yield asked

    def _trace(self, lowering: Lowering, choices: Choices, is_short: bool) -> Trace:
        seen = _seen_in_trace(choices)
        if (seen, is_short) not in self._traced:
            self._progress(f"tracing: {' '.join(map(str, choices))}")
            self._traced[seen, is_short] = self.planning_input.dry_run(lowering, seen, is_short)
            self._progress("searching")
        return self._traced[seen, is_short]

    def _count(self, choices: Choices, is_short: bool, is_long: bool) -> Counted:
        lowering, names = self._target.lowering(), [choice.technique for choice in choices]
        counted = self._target.count(self._trace(lowering, choices, is_short), choices, is_long)
        learned = learned_peak(self._calibration, lowering.name, names) if self._calibration else None
        counted = replace(counted, learned=learned) if learned else counted
        return counted if self._target.spec is not None else replace(counted, spread=_LONG_RUN_SPREAD)

    def _record(self, found: Found, in_order: Sequence[Evaluation], smallest_bytes: int | None) -> Plan:
        evaluations = (*in_order, *found.lossy_alternatives, *found.candidates)
        names = {choice.technique for evaluation in evaluations for choice in evaluation.choices}
        names |= {choice.technique for one in found.rejected for choice in one.choices}
        chosen = self._candidate(in_order[0], self._is_short)
        near = self._near(found, in_order[0]) if smallest_bytes is None else ()
        about, numerics = told_of(names, is_whole=in_order[0].micro_batch == self.planning_input.batch_size)
        return Plan(
            budget=self._budget,
            fallbacks=_fallback_schedule(in_order),
            limit_bytes=self._target.limit_bytes,
            plain=found.plain.configuration(),
            rejected=found.rejected,
            lossy_alternatives=() if found.fits else tuple(map(self._alternative, found.lossy_alternatives)),
            smallest_budget_bytes=None if smallest_bytes is None else smallest_bytes + self._target.kept_back_bytes,
            prediction=chosen.prediction,
            pinned=self._decided.pinned,
            required=tuple(sorted(self._decided.required)),
            forbidden=tuple(sorted(self._decided.forbidden)),
            left_out=dict(self._decided.left_out),
            about=about,
            numerics=numerics,
            time_factor=chosen.time_factor,
            off_device=chosen.off_device,
            candidates=tuple(self._candidate(evaluation, is_short=True) for evaluation in near),
            loss_check=self.loss_check,
            tokenizer_bytes=self.planning_input.tokenizer_bytes,
            made_for=self.planning_input.facts(self._target.lowering().name),
            num_traces=self.planning_input.num_traces,
            plan_seconds=time.perf_counter() - self._started_seconds,
        )

    def _near(self, found: Found, chosen: Evaluation) -> Iterator[Evaluation]:
        """Yield the candidates that probably fit, evaluated over as many steps as the plan."""
        for one in found.candidates:
            evaluation = self.evaluate(one.choices, is_short=True, is_long=True)
            if (
                evaluation.choices != chosen.choices
                and evaluation.fits
                and evaluation.peak.likely_bytes <= self._target.limit_bytes
            ):
                yield evaluation

    def _candidate(self, evaluation: Evaluation, is_short: bool) -> Candidate:
        learned, counted = self._learned(evaluation.choices), self._count(evaluation.choices, is_short, is_long=True)
        return Candidate(
            configuration=evaluation.configuration(),
            prediction=self._prediction(evaluation.choices, counted),
            time_factor=learned.low if learned else 1.0,
            off_device=self._off_device(counted, evaluation.micro_batch),
        )

    def _alternative(self, evaluation: Evaluation) -> Rejected:
        """Return a lossy alternative with the reason why it is rejected: its technique is not allowed."""
        names = [choice.technique for choice in evaluation.choices if TECHNIQUES[choice.technique].numerics == "lossy"]
        closed = ", ".join(name for name in names if name not in self.planning_input.allow)
        budget_mib = -(-(evaluation.need_bytes + self._target.kept_back_bytes) >> 20)
        reason = (
            f"would fit a budget of {budget_mib}MiB if the job had `allow: [{closed}]`; it is the only combination "
            f"with {closed} that was evaluated"
        )
        return Rejected(choices=evaluation.choices, reason=reason, peak=evaluation.peak, step_time=evaluation.step_time)

    def prediction(self, choices: Choices) -> Prediction:
        """Return the prediction record of a combination."""
        return self._prediction(choices, self._count(choices, self._is_short, is_long=True))

    def _prediction(self, choices: Choices, counted: Counted) -> Prediction:
        planning_input = self.planning_input
        said = (technique_of(choice.technique).precision_of(choice) for choice in choices)
        precision = next(filter(None, said), planning_input.workload.precision)
        return self._target.predict(
            counted,
            planning_input.described(precision),
            precision,
            samples_of(choices),
            planning_input.sequence_length,
            planning_input.batch_size,
            planning_input.num_ranks,
        )


def _seen_in_trace(choices: Choices) -> Choices:
    return tuple(choice for choice in choices if technique_of(choice.technique).is_traced)


def _fallback_schedule(in_order: Sequence[Evaluation]) -> tuple[Configuration, ...]:
    """Return the configurations of evaluations, leaving out any that needs at least the memory of its predecessor."""
    kept = [
        in_order[0],
        *(evaluation for before, evaluation in pairwise(in_order) if evaluation.need_bytes < before.need_bytes),
    ]
    return tuple(evaluation.configuration() for evaluation in kept)
