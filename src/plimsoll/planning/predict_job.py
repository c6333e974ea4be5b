"""Prediction of a job's peak memory, and of the largest sizes that fit, from dry runs and models of the allocators.

    prediction = predict_job(job, device="rtx3060")

Does not read the texts (see `plimsoll.data.quick_facts`). The prediction is for the process that `plimsoll train` runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

from plimsoll.data.quick_facts import TextSketch, sketch_texts
from plimsoll.device.cuda.gpus import all_gpus
from plimsoll.errors import InputError, JobError
from plimsoll.memory.largest_size import Found, largest_that_fits
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.predict import Counted
from plimsoll.models.assemble import choose_device, require_vectors
from plimsoll.models.build import build_model
from plimsoll.planning.baseline import job_baseline, load_model_code
from plimsoll.planning.cached_baseline import Baseline
from plimsoll.planning.cached_traces import trace_of
from plimsoll.planning.constraints import pinned_choices
from plimsoll.planning.dry_run.processes import Asked, Tracers
from plimsoll.planning.dry_run.ranks import threads_of_rank
from plimsoll.planning.job_checks import require_sound
from plimsoll.planning.targets import Target, find_target, gpu_target
from plimsoll.planning.teacher_loss import require_teacher
from plimsoll.records.comparison import Calibration
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.records.prediction import Answer, Estimate, Prediction, WhatIf
from plimsoll.records.trace import Category, Trace
from plimsoll.step.job_step import subject_of
from plimsoll.step.recovery import samples_of_rank
from plimsoll.techniques import Choices, in_order

Progress = Callable[[str], None]

_LONGEST_SEQUENCE = 1 << 17
_LARGEST_BATCH = 1 << 14
_FACTORS = (0.5, 1, 2)
_GROWING: tuple[Category, ...] = ("activations", "temporaries", "inputs")


def predict_job(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    micro_batch: int | None = None,
    search: bool = False,
    what_if: bool = False,
    lengths: Sequence[int] | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    started: Baseline | None = None,
    texts: TextSketch | None = None,
) -> Prediction:
    """Predict the peak memory of a job.

    Args:
        job: the training.
        device: ``"cpu"``, ``"local"`` or ``"cuda"`` for a device of this machine, or the name of a GPU. ``None`` uses
            the job's device.
        limit_bytes: budget in bytes. ``None`` uses the job's budget, or the whole device if the job has no budget.
        micro_batch: number of samples in one forward and backward pass; ``None`` is the whole batch.
        search: find the largest micro-batch, the longest sequence and the smallest GPU that fit.
        what_if: also predict the peak for half and double the micro-batch and the sequence length.
        lengths: token count of each text, for tasks with labels, whose batches are padded to their longest text. The
            peak is predicted for the longest possible batch after other batches, which fragment the allocator's memory.
        calibration: correction factors learned from measured runs, which widen the range
            (`plimsoll.memory.compare.calibrate`).
        progress: called with a message for each stage of the work.
        started: a running measurement of the baseline, for a prediction for this CPU; ``None`` starts a measurement.
        texts: facts of the texts; ``None`` sketches them from the files.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DeviceError: if there is no such device.
        InputError: if the model cannot be traced.
    """
    require_sound(job, device, limit_bytes, has_data=False)
    with threads_of_rank(job.ranks), ExitStack() as stack:
        most, said = samples_of_rank(job), progress or (lambda text: None)
        size = micro_batch or most
        if not 1 <= size <= most:
            raise InputError(f"a micro-batch of {size} is not a part of a batch of {most}: give 1 to {most}")
        checked = _checked(lengths, job)
        texts = _texts_of_model(job, texts)
        # The worker processes trace only the job as given, not batches of other lengths.
        tracers = Tracers() if checked else stack.enter_context(Tracers.started(job, texts))
        traces = _Traces(job, texts, checked, tracers, said)
        target = _target(traces, device, limit_bytes, size, started)
        target.calibration = calibration
        pinned = _pinned_on("cpu" if target.spec is None else "cuda", job)
        return _predicted(_Forecast(traces, target, pinned), size, search, what_if)


def _predicted(forecast: _Forecast, micro_batch: int, search: bool, what_if: bool) -> Prediction:
    started_seconds = time.perf_counter()
    prediction = forecast.predict(micro_batch)
    questions: list[Callable[[], Answer]] = []
    if search or not prediction.fits:
        questions.append(lambda: forecast.largest_micro_batch(micro_batch))
    if search:
        questions += [lambda: forecast.longest_sequence(micro_batch), lambda: forecast.smallest_device(micro_batch)]
    answers = tuple(question() for question in questions)
    what_ifs = forecast.what_ifs(micro_batch) if what_if else ()
    return prediction.model_copy(
        update={"answers": answers, "what_ifs": what_ifs, "predict_seconds": time.perf_counter() - started_seconds}
    )


def _texts_of_model(job: Job, known: TextSketch | None) -> TextSketch:
    """Load the code of the model, and return the facts of the texts that the model depends on."""
    require_vectors(job)
    load_model_code(job)  # transformers must not be imported during the dry run
    texts = known or sketch_texts(job)
    if job.distill is not None:
        require_teacher(job, texts)
    return texts


def _target(
    traces: _Traces, device: str | None, limit_bytes: int | None, micro_batch: int, started: Baseline | None
) -> Target:
    """Find the target. For this CPU, make the first trace while the baseline is measured."""
    job = traces.job

    def baseline() -> Estimate:
        pinned = _pinned_on("cpu", job)
        if started is None:
            traces.progress("starting a process to measure its memory without a model")
            return job_baseline(job)
        traces.of(micro_batch, job.sequence_length, CpuLowering(), pinned)  # while the baseline process runs
        return started.wait()

    budget_bytes = limit_bytes if limit_bytes is not None else job.budget.device_bytes
    return find_target(choose_device(job) if device is None else device, budget_bytes, baseline)


def _pinned_on(device: str, job: Job) -> Choices:
    return in_order(pinned_choices(job, device))


@dataclass
class _Traces:
    """The traces of one job and its variants (other lengths and batch sizes), each made once."""

    job: Job
    texts: TextSketch
    lengths: Sequence[int]
    tracers: Tracers
    progress: Progress
    _made: dict[tuple[int, int, str], Trace] = field(default_factory=dict)

    def of(self, micro_batch: int, sequence_length: int, lowering: Lowering, pinned: Choices) -> Trace:
        key = (micro_batch, sequence_length, lowering.name)
        if key not in self._made:
            self.progress(f"tracing: micro-batch {micro_batch} of {sequence_length} tokens for {lowering.name}")
            job, asked = self._varied(micro_batch, sequence_length), _asked(micro_batch, lowering, pinned)
            lengths = batch_lengths(self.lengths, job) if self.lengths else ()
            ahead = self.tracers.take(asked) if job == self.job else None
            self._made[key], _ = ahead or trace_of(job, self.texts, lowering, asked.choices, lengths)
            self.progress("counting")
        return self._made[key]

    def suppose(self, micro_batch: int, lowering: Lowering, pinned: Choices) -> None:
        """Begin a trace of the job with another micro-batch, if that may be requested next."""
        job = self._varied(micro_batch, self.job.sequence_length)
        if job == self.job and (micro_batch, job.sequence_length, lowering.name) not in self._made:
            self.tracers.suppose([_asked(micro_batch, lowering, pinned)])

    def _varied(self, micro_batch: int, sequence_length: int) -> Job:
        """Return the job with another sequence length, and a batch that is at least as large as the micro-batch."""
        batch_size = max(micro_batch * self.job.ranks, self.job.batch_size)
        return self.job.model_copy(update={"sequence_length": sequence_length, "batch_size": batch_size})


def _asked(micro_batch: int, lowering: Lowering, pinned: Choices) -> Asked:
    return Asked(lowering, (*pinned, micro_batch_choice(micro_batch)), is_short=False)


@dataclass(frozen=True)
class _Forecast:
    """Predictions of one job and its variants (other lengths and batch sizes) on one target, with the job's pins."""

    traces: _Traces
    target: Target
    pinned: Choices

    @property
    def job(self) -> Job:
        return self.traces.job

    def predict(self, micro_batch: int) -> Prediction:
        """Predict the job with a micro-batch, without other changes."""
        job = self.job
        counted = self._count(micro_batch, job.sequence_length, self.target)
        return self.target.predict(
            counted,
            subject_of(job, job.own_precision),
            job.own_precision,
            micro_batch,
            job.sequence_length,
            samples_of_rank(job),
            job.ranks,
        )

    def largest_micro_batch(self, start: int) -> Answer:
        """Find the largest micro-batch that fits. If it exceeds the batch of the job, the batch grows with it."""
        try_size = partial(self._at, sequence_length=self.job.sequence_length)
        found = self._largest(try_size, start, _LARGEST_BATCH, self._suppose)
        peak = found.said.peak if found.said else None
        return Answer(question="largest micro-batch", value=found.value, peak=peak, is_bound=found.is_bound)

    def longest_sequence(self, micro_batch: int) -> Answer:
        """Find the longest sequence that fits and for which the model can be built."""
        most = self._longest_that_can_be_built()
        found = self._largest(lambda length: self._at(micro_batch, length), self.job.sequence_length, most)
        peak = found.said.peak if found.said else None
        return Answer(question="longest sequence", value=found.value, peak=peak, is_bound=found.is_bound)

    def smallest_device(self, micro_batch: int) -> Answer:
        """Find the GPU with the least memory on which the job fits."""
        for gpu in sorted(all_gpus(), key=lambda gpu: (gpu.capacity_bytes, gpu.name)):
            target = gpu_target(gpu, None)
            counted = self._count(micro_batch, self.job.sequence_length, target)
            if target.fits(counted):
                return Answer(question="smallest device", value=target.name, peak=counted.peak)
        return Answer(question="smallest device", value=None, peak=None)

    def what_ifs(self, micro_batch: int) -> tuple[WhatIf, ...]:
        """Predict the peak for half and double the micro-batch and the sequence length."""
        lengths = sorted({max(2, int(self.job.sequence_length * factor)) for factor in _FACTORS})
        sizes = sorted({max(1, int(micro_batch * factor)) for factor in _FACTORS})
        found = []
        for length in lengths:
            for size in sizes:
                with suppress(JobError):  # the model does not support this length
                    counted = self._count(size, length, self.target)
                    found.append(
                        WhatIf(
                            micro_batch=size,
                            sequence_length=length,
                            peak=counted.peak,
                            fits=self.target.fits(counted),
                        )
                    )
        return tuple(found)

    def _largest(
        self,
        try_size: Callable[[int], Counted],
        start: int,
        most: int,
        suppose: Callable[[int], None] = lambda size: None,
    ) -> Found[Counted]:
        def asked(value: int) -> tuple[int, bool, Counted]:
            counted = try_size(value)
            return counted.peak.likely_bytes - self.target.limit_bytes, self.target.fits(counted), counted

        return largest_that_fits(asked, start, most, growing_bytes=_growing_bytes, suppose=suppose)

    def _suppose(self, micro_batch: int) -> None:
        self.traces.suppose(micro_batch, self.target.lowering(), self.pinned)

    def _at(self, micro_batch: int, sequence_length: int) -> Counted:
        return self._count(micro_batch, sequence_length, self.target)

    def _count(self, micro_batch: int, sequence_length: int, target: Target) -> Counted:
        trace = self.traces.of(micro_batch, sequence_length, target.lowering(), self.pinned)
        return target.count(trace, self.pinned, is_long=True)

    def _longest_that_can_be_built(self) -> int:
        """Return the longest sequence that the model supports, among the job's length times powers of two."""
        length = self.job.sequence_length
        with suppress(JobError):
            while length < _LONGEST_SEQUENCE:
                longer = self.job.model_copy(update={"sequence_length": 2 * length})
                build_model(longer, *self.traces.texts.of_model, device="meta")
                if longer.distill is not None:
                    require_teacher(longer, self.traces.texts)
                length *= 2
        return length


def _growing_bytes(counted: Counted) -> int:
    """Return the bytes of the peak that grow with the batch or the sequence length, including the heap's holes."""
    live = counted.live.by_category.items()
    standing_bytes = sum(int(column[counted.peak_row]) for name, column in live if name not in _GROWING)
    return counted.peak.likely_bytes - counted.fixed_part.likely_bytes - standing_bytes


def batch_lengths(lengths: Sequence[int], job: Job) -> tuple[int, ...]:
    """Return the padded token counts of four batches: two random batches, each before the longest possible batch."""
    random = Random(job.seed)
    usual = [min(max(random.choices(lengths, k=samples_of_rank(job))), job.sequence_length) for _ in range(2)]
    longest = min(max(lengths), job.sequence_length)
    return usual[0], longest, usual[1], longest


def _checked(lengths: Sequence[int] | None, job: Job) -> Sequence[int]:
    if lengths is None:
        return ()
    if not job.is_labelled:
        raise InputError(
            f"lengths of texts do not matter for {job.task}: it cuts windows of sequence_length={job.sequence_length}; "
            "leave them out"
        )
    if not lengths or min(lengths) < 1:
        shortest = min(lengths, default=0)
        raise InputError(f"cannot use {len(lengths)} lengths, the shortest {shortest} tokens: give 1 or more")
    return lengths
