"""What a job will need, and what would fit: rehearses it and asks the target's allocators.

    prediction = predict_job(job, device="rtx3060")

The device may be this machine's processor, a GPU that is here, or one that is only known by name. Does NOT look at the
texts (see `plimsoll.data.sketch`), and predicts the process that `plimsoll train` runs: on the CPU it starts such a
process for a moment, to see what it takes before there is a model.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from plimsoll.assemble import choose_device
from plimsoll.data.sketch import TextSketch, sketch_texts
from plimsoll.device.base import backend_for
from plimsoll.device.gpus import all_gpus, find_gpu, spec_of
from plimsoll.device.probe import versions
from plimsoll.errors import BudgetError, DeviceError, InputError, JobError
from plimsoll.memory.inverse import Found, largest_that_fits
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.predict import Counted, count_on_cpu, count_on_cuda
from plimsoll.records.gpu import DeviceSpec
from plimsoll.records.heap import DEFAULT_HEAP, FAST_HEAP
from plimsoll.records.job import Job
from plimsoll.records.prediction import Answer, Estimate, Prediction, WhatIf
from plimsoll.records.units import format_bytes
from plimsoll.run.rehearse import rehearse_job

Progress = Callable[[str], None]

_LONGEST_SEQUENCE = 1 << 17
_LARGEST_BATCH = 1 << 14
_BASELINE_SPREAD = 0.03  # of the process before there is a model: libraries load and start threads as they are used
_FACTORS = (0.5, 1, 2)


@dataclass
class _Target:
    """Where the training is to run, and the limit that holds there."""

    name: str
    capacity_bytes: int
    limit_bytes: int
    limit_source: str
    spec: DeviceSpec | None = None
    baseline: Estimate | None = None
    has_budget: bool = False

    def lowering(self) -> Lowering:
        if self.spec is None:
            return CpuLowering()
        major, _, minor = (self.spec.architecture or "8.0").partition(".")
        return CudaLowering((int(major), int(minor)))

    def count(self, job: Job, texts: TextSketch, micro_batch: int) -> Counted:
        trace = rehearse_job(job, texts, self.lowering(), micro_batch)
        if self.spec is not None:
            return count_on_cuda(trace, self.spec, self.limit_bytes)
        assert self.baseline is not None
        return count_on_cpu(trace, self.baseline, FAST_HEAP if self.has_budget else DEFAULT_HEAP)


def predict_job(
    job: Job,
    *,
    device: str | None = None,
    limit_bytes: int | None = None,
    micro_batch: int | None = None,
    search: bool = False,
    what_if: bool = False,
    progress: Progress | None = None,
) -> Prediction:
    """Predict the peak memory of a job.

    Args:
        job: what is to be trained.
        device: ``"cpu"``, ``"local"`` or ``"cuda"`` for what is here, or the name of a GPU; ``None`` is the job's.
        limit_bytes: what the training may use; ``None`` is the job's budget, or else all that the device has.
        micro_batch: samples of one forward and backward pass; ``None`` is the whole batch.
        search: find the largest micro-batch, the longest sequence and the smallest GPU that fit.
        what_if: predict other micro-batches and lengths too.
        progress: told what is being done.

    Raises:
        JobError: if the model or the optimizer cannot be built.
        DeviceError: if there is no such device.
        InputError: if the model cannot be traced.
    """
    started = time.perf_counter()
    forecast = _Forecast(job, device, limit_bytes, progress or (lambda text: None))
    size = micro_batch or job.batch_size
    if not 1 <= size <= job.batch_size:
        raise InputError(f"a micro-batch of {size} is not a part of a batch of {job.batch_size}: give 1 to that many")
    prediction = forecast.predict(size)
    questions: list[Callable[[], Answer]] = []
    if search or not prediction.fits:
        questions.append(lambda: forecast.largest_micro_batch(size))
    if search:
        questions += [lambda: forecast.longest_sequence(size), lambda: forecast.smallest_device(size)]
    answers = tuple(question() for question in questions)
    what_ifs = forecast.what_ifs(size) if what_if else ()
    return prediction.model_copy(
        update={"answers": answers, "what_ifs": what_ifs, "predict_seconds": time.perf_counter() - started}
    )


@dataclass
class _Forecast:
    """Predictions of one job and its variants on one target; each is traced once."""

    job: Job
    device: str | None
    limit_bytes: int | None
    progress: Progress
    _known: dict[tuple[int, int, str], tuple[Counted, _Target]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts = sketch_texts(self.job)
        self.target = _target_of(self.job, self.device, self.limit_bytes, self.progress)

    def predict(self, micro_batch: int) -> Prediction:
        """Predict the job as it is."""
        counted = self._count(micro_batch, self.job.sequence_length, self.target)
        target = self.target
        return Prediction(
            subject=_subject(self.job),
            device=target.name,
            device_kind="cpu" if target.spec is None else "cuda",
            capacity_bytes=target.capacity_bytes,
            limit_bytes=target.limit_bytes,
            limit_source=target.limit_source,
            micro_batch=micro_batch,
            sequence_length=self.job.sequence_length,
            batch_size=self.job.batch_size,
            precision=self.job.precision,
            peak=counted.peak,
            allocated=counted.most_allocated,
            reserved=counted.most_reserved,
            context=counted.fixed_part,
            host=None,
            moment=counted.peak_moment(),
            parts=counted.parts(),
            largest=counted.largest(),
            timeline=counted.timeline(),
            assumptions=counted.trace.assumptions,
            runs_out_at=counted.oom_moment(),
            versions=versions(),
            predict_seconds=0.0,
        )

    def largest_micro_batch(self, start: int) -> Answer:
        """Find the largest micro-batch that fits; beyond the batch of the job, the batch is as large."""
        found = self._largest(partial(self._at, sequence_length=self.job.sequence_length), start, _LARGEST_BATCH)
        return Answer(question="largest micro-batch", value=found.value, peak=found.said, is_bound=found.is_bound)

    def longest_sequence(self, micro_batch: int) -> Answer:
        """Find the longest sequence that fits, as far as the model can be built for it."""
        most = self._longest_that_can_be_built()
        found = self._largest(lambda length: self._at(micro_batch, length), self.job.sequence_length, most)
        return Answer(question="longest sequence", value=found.value, peak=found.said, is_bound=found.is_bound)

    def smallest_device(self, micro_batch: int) -> Answer:
        """Find the GPU of the table with the least memory on which the job fits."""
        gpus = sorted(all_gpus(), key=lambda gpu: (gpu.capacity_bytes, gpu.name))
        low, high, best, best_peak = 0, len(gpus), None, None
        while low < high:
            middle = (low + high) // 2
            target = _gpu_target(gpus[middle], None)
            self.progress(f"trying {target.name}")
            counted = self._count(micro_batch, self.job.sequence_length, target)
            if _fits(counted, target):
                high, best, best_peak = middle, target.name, counted.peak
            else:
                low = middle + 1
        return Answer(question="smallest device", value=best, peak=best_peak)

    def what_ifs(self, micro_batch: int) -> tuple[WhatIf, ...]:
        """Predict half and double the micro-batch and the length."""
        lengths = sorted({max(2, int(self.job.sequence_length * factor)) for factor in _FACTORS})
        sizes = sorted({max(1, int(micro_batch * factor)) for factor in _FACTORS})
        found = []
        for length in lengths:
            for size in sizes:
                with suppress(JobError):  # the model cannot be that long
                    counted = self._count(size, length, self.target)
                    found.append(
                        WhatIf(
                            micro_batch=size,
                            sequence_length=length,
                            peak=counted.peak,
                            fits=_fits(counted, self.target),
                        )
                    )
        return tuple(found)

    def _largest(self, try_size: Callable[[int], Counted], start: int, most: int) -> Found[Estimate]:
        def asked(size: int) -> tuple[int, bool, Estimate]:
            counted = try_size(size)
            return counted.peak.likely_bytes - self.target.limit_bytes, _fits(counted, self.target), counted.peak

        return largest_that_fits(asked, start, most)

    def _at(self, micro_batch: int, sequence_length: int) -> Counted:
        return self._count(micro_batch, sequence_length, self.target)

    def _count(self, micro_batch: int, sequence_length: int, target: _Target) -> Counted:
        key = (micro_batch, sequence_length, target.name)
        if key not in self._known:
            self.progress(f"tracing micro-batch {micro_batch} of {sequence_length} tokens on {target.name}")
            changes = {"sequence_length": sequence_length, "batch_size": max(micro_batch, self.job.batch_size)}
            counted = target.count(self.job.model_copy(update=changes), self.texts, micro_batch)
            self._known[key] = counted, target
        return self._known[key][0]

    def _longest_that_can_be_built(self) -> int:
        """The longest sequence, a power of two times the job's, that the model takes."""
        from plimsoll.models.build import build_model

        length = self.job.sequence_length
        with suppress(JobError):
            while length < _LONGEST_SEQUENCE:
                build_model(self.job.model_copy(update={"sequence_length": 2 * length}), *self.texts, device="meta")
                length *= 2
        return length


def _fits(counted: Counted, target: _Target) -> bool:
    return counted.oom_row is None and counted.peak.likely_bytes <= target.limit_bytes


def _target_of(job: Job, device: str | None, limit_bytes: int | None, progress: Progress) -> _Target:
    """The device that is meant, with the limit that holds on it."""
    name = (device or choose_device(job)).lower()
    budget_bytes = limit_bytes if limit_bytes is not None else job.budget.device_bytes
    if name == "cpu":
        return _cpu_target(job, budget_bytes, progress)
    if name == "local" and not _has_gpu():
        return _cpu_target(job, budget_bytes, progress)
    if name == "local" or name.startswith("cuda"):
        return _gpu_target(spec_of(backend_for("cuda" if name == "local" else name).probe()), budget_bytes)
    return _gpu_target(find_gpu(name), budget_bytes)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu_target(spec: DeviceSpec, budget_bytes: int | None) -> _Target:
    _refuse_more_than(budget_bytes, spec.capacity_high_bytes, spec.name)
    return _Target(
        name=spec.name,
        capacity_bytes=spec.capacity_bytes,
        limit_bytes=budget_bytes or spec.capacity_bytes,
        limit_source="the budget" if budget_bytes else "all that the card has",
        spec=spec,
    )


def _cpu_target(job: Job, budget_bytes: int | None, progress: Progress) -> _Target:
    device = backend_for("cpu").probe()
    _refuse_more_than(budget_bytes, device.capacity_bytes, device.name)
    progress("starting a process to see what it takes without a model")
    return _Target(
        name=device.name,
        capacity_bytes=device.capacity_bytes,
        limit_bytes=budget_bytes or device.capacity_bytes,
        limit_source="the budget" if budget_bytes else "all that this process may use of the machine",
        baseline=cpu_baseline(job, has_budget=budget_bytes is not None),
        has_budget=budget_bytes is not None,
    )


def cpu_baseline(job: Job, has_budget: bool) -> Estimate:
    """What a training process takes before it has a model, read from one."""
    command = [sys.executable, "-m", "plimsoll", "baseline-worker"]
    child = subprocess.run(command, input=job.to_json(), capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DeviceError(
            f"cannot start a process to see what a training takes before it has a model (exit {child.returncode}: "
            f"{last[0]}): check that {sys.executable} runs"
        )
    private_bytes = int(child.stdout)
    return Estimate(
        likely_bytes=private_bytes,
        low_bytes=int(private_bytes * (1 - _BASELINE_SPREAD)),
        high_bytes=int(private_bytes * (1 + _BASELINE_SPREAD)),
        measured_bytes=private_bytes,
    )


def _refuse_more_than(budget_bytes: int | None, capacity_bytes: int, name: str) -> None:
    if budget_bytes is not None and budget_bytes > capacity_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} is more than a {name} has, {format_bytes(capacity_bytes)}: give "
            "that or less, or another --device"
        )


def _subject(job: Job) -> str:
    model = job.model if isinstance(job.model, str) else job.model.get("architecture", "model")
    return f"{model}, {job.task}, {job.batch_size} x {job.sequence_length} tokens a step, {job.precision}"
