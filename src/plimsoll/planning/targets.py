"""The device that a training will use, with its memory limit: this machine's CPU or GPU, or a GPU given by name.

On the CPU, a prediction starts from the memory of the process without a model. For a job, a short-lived training
process measures this memory. In a user's program, it is measured in the program itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from plimsoll.device.base import backend_for
from plimsoll.device.cpu.data_limit import MARGIN_BYTES
from plimsoll.device.cuda.gpus import find_gpu, spec_of
from plimsoll.device.probe import versions
from plimsoll.errors import BudgetError
from plimsoll.memory.heaps import Heaps
from plimsoll.memory.library_buffers import exchange_of, kept_by_exchanges
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.base import Lowering
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cpu_scratch import kept_by_libraries
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.predict import Counted, count_on_cpu, count_on_cuda
from plimsoll.models.assemble import choose_device
from plimsoll.planning.baseline import measured
from plimsoll.records.allocator import HeapRules
from plimsoll.records.comparison import Calibration
from plimsoll.records.device import DeviceSpec
from plimsoll.records.job import Job
from plimsoll.records.prediction import Estimate, Prediction
from plimsoll.records.trace import Assumption, Trace
from plimsoll.records.units import format_bytes
from plimsoll.techniques import Choices
from plimsoll.techniques.mechanisms.allocators import allocator_rules, rules_in_force

_WORTH_SAYING = 0.01  # share of the peak
_WHOLE_MACHINE = "memory available to this process"
# Resident bytes of the host process that uses CUDA: the lower end is torch and transformers without CUDA, the upper end
# includes all kernels (pytorch#113326 reports 0.44 and 2.06 GB). Not measured here.
CUDA_HOST_BYTES = (420 << 20, 1965 << 20)


@dataclass
class Target:
    """A device with its limit. A CPU has a ``baseline``, and a GPU a ``spec``.

    ``limit_bytes`` is the budget minus the headroom, ``kept_back_bytes``. Without a budget, it is ``capacity_bytes``.
    ``limit_source`` describes in words where the limit comes from.
    """

    name: str
    capacity_bytes: int
    limit_bytes: int
    limit_source: str
    spec: DeviceSpec | None = None
    baseline: Estimate | None = None
    has_budget: bool = False
    kept_back_bytes: int = 0
    calibration: Calibration | None = None
    heaps: Heaps = field(default_factory=Heaps)
    made_seconds: float = field(default_factory=time.perf_counter)

    def lowering(self) -> Lowering:
        """Return the lowering for traces on this target."""
        if self.spec is None:
            return CpuLowering()
        major, _, minor = (self.spec.architecture or "8.0").partition(".")
        num_sms = {} if self.spec.num_sms is None else {"num_sms": self.spec.num_sms}
        return CudaLowering((int(major), int(minor)), **num_sms)

    def count(
        self, trace: Trace, choices: Choices = (), is_long: bool = False, heap: HeapRules | None = None
    ) -> Counted:
        """Predict the memory of a trace that was lowered for this target.

        Args:
            trace: the trace.
            choices: the choices in force; only choices that configure the heap or the allocator matter here.
            is_long: see `count_on_cpu`.
            heap: the rules of the host's heap; ``None`` uses the rules that the choices set.
        """
        counted = self._counted(trace, choices, is_long, heap)
        learned = self.calibration.targets.get(trace.lowered_to) if self.calibration else None
        return replace(counted, learned=learned.live_ratio) if learned else counted

    def _counted(self, trace: Trace, choices: Choices, is_long: bool, heap: HeapRules | None) -> Counted:
        exchanged = kept_by_exchanges(trace, "cpu" if self.spec is None else "cuda")
        if self.spec is not None:
            return count_on_cuda(trace, self.spec, self.limit_bytes, allocator_rules(choices), exchanged)
        assert self.baseline is not None
        import torch

        kept = kept_by_libraries(trace.texts, torch.get_num_threads())
        kept = kept if exchanged is None else kept + exchanged
        rules = heap or rules_in_force(choices, self.has_budget)
        baseline = self.baseline + kept
        return count_on_cpu(trace, baseline, rules, has_limit=self.has_budget, is_long=is_long, heaps=self.heaps)

    def fits(self, counted: Counted) -> bool:
        """Return whether the likely peak is within the limit."""
        return counted.oom_row is None and counted.peak.likely_bytes <= self.limit_bytes

    def predict(  # noqa: PLR0917 -- fields of the record
        self,
        counted: Counted,
        subject: str,
        precision: str,
        micro_batch: int | None = None,
        sequence_length: int | None = None,
        batch_size: int | None = None,
        num_ranks: int = 1,
    ) -> Prediction:
        """Return the prediction record for the counted memory of a trace."""
        kind: Literal["cpu", "cuda"] = "cpu" if self.spec is None else "cuda"
        exchanged = kept_by_exchanges(counted.trace, kind)
        return Prediction(
            subject=subject,
            device=self.name,
            device_kind=kind,
            capacity_bytes=self.capacity_bytes,
            limit_bytes=self.limit_bytes,
            limit_source=self.limit_source,
            micro_batch=micro_batch,
            sequence_length=sequence_length,
            batch_size=batch_size,
            precision=precision,
            peak=counted.peak,
            allocated=counted.most_allocated,
            reserved=counted.most_reserved,
            context=counted.fixed_part,
            host=None if self.spec is None else _host(counted.trace),
            exchange=None if exchanged is None else exchange_of(counted.trace, num_ranks, exchanged),
            moment=counted.peak_moment(),
            parts=counted.parts(),
            largest=counted.largest(),
            timeline=counted.timeline(),
            assumptions=_assumptions(counted),
            runs_out_at=counted.oom_moment(),
            versions=versions(),
            predict_seconds=time.perf_counter() - self.made_seconds,
        )


def find_target(device: str, budget_bytes: int | None, baseline: Callable[[], Estimate]) -> Target:
    """Find a device and its limit.

    Args:
        device: ``"cpu"``; ``"local"``, the GPU of this machine or else its CPU; ``"cuda"``; or a GPU's name.
        budget_bytes: memory that the training may use; ``None`` is the whole device.
        baseline: called for a CPU, to get the memory of the process without a model.

    Raises:
        DeviceError: if there is no such device.
        BudgetError: if the budget exceeds the device's memory.
    """
    name = device_here(device)
    if name == "cpu":
        return _cpu_target(budget_bytes, baseline)
    is_here = name == "cuda" or name.startswith("cuda:")
    return gpu_target(spec_of(backend_for(name).probe()) if is_here else find_gpu(device), budget_bytes)


def device_here(device: str | None) -> str:
    """Return the device's name on this machine: ``local`` and ``None`` are the GPU if present, or else the CPU."""
    import torch

    name = (device or "local").lower()
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "local" else name


def gpu_target(spec: DeviceSpec, budget_bytes: int | None) -> Target:
    """Return the target for a GPU.

    Raises:
        BudgetError: if the budget exceeds the GPU's memory.
    """
    _refuse_more_than(budget_bytes, spec.capacity_high_bytes, spec.name)
    return Target(
        name=spec.name,
        capacity_bytes=spec.capacity_bytes,
        limit_bytes=budget_bytes or spec.capacity_bytes,
        limit_source="the budget" if budget_bytes else "the whole card",
        spec=spec,
    )


def require_budget(job: Job) -> None:
    """Check that this machine has the budget of a job, before its data are prepared.

    Raises:
        BudgetError: if the budget exceeds the memory of the device or, with a GPU, of the host.
        DeviceError: if the device is not present.
    """
    name = choose_device(job)
    device = backend_for(name).probe()
    if name == "cpu":
        _refuse_more_than(job.budget.device_bytes, device.capacity_bytes, device.name)
        return
    _refuse_more_than(job.budget.device_bytes, spec_of(device).capacity_high_bytes, device.name)
    host = backend_for("cpu").probe()
    _refuse_more_than(job.budget.host_bytes, host.capacity_bytes, host.name)


def private_budget_bytes(job: Job) -> int | None:
    """Return the job's budget in bytes for private memory of a process; ``None`` if the job sets none."""
    return job.budget.device_bytes if choose_device(job) == "cpu" else job.budget.host_bytes


def own_baseline(traced_bytes: int) -> Estimate:
    """Measure the memory of this process, without the ``traced_bytes`` that the prediction counts separately."""
    backend = backend_for("cpu")
    backend.baseline_bytes()  # starts the thread pools
    return measured(max(0, backend.use().used_bytes - traced_bytes))


def _assumptions(counted: Counted) -> tuple[Assumption, ...]:
    if counted.unwritten_bytes < _WORTH_SAYING * counted.peak.likely_bytes:
        return counted.trace.assumptions
    text = (
        f"{format_bytes(counted.unwritten_bytes)} of the budget are reserved and never written (buffers of LSTM layers "
        "and holes of the heap): its limit counts them"
    )
    return (*counted.trace.assumptions, Assumption(text=text, high_bytes=counted.unwritten_bytes))


def _host(trace: Trace) -> Estimate:
    """Return the host memory that training on a GPU needs, for the process and for the trace's tensors on the host."""
    traced_bytes = live_bytes(trace, on_host=True).peak_bytes
    low_bytes, high_bytes = CUDA_HOST_BYTES
    likely_bytes = (low_bytes + high_bytes) // 2
    return Estimate(
        likely_bytes=traced_bytes + likely_bytes,
        low_bytes=traced_bytes + low_bytes,
        high_bytes=traced_bytes + high_bytes,
        traced_bytes=traced_bytes,
        assumed_bytes=likely_bytes,
    )


def _cpu_target(budget_bytes: int | None, baseline: Callable[[], Estimate]) -> Target:
    device = backend_for("cpu").probe()
    kept_back_bytes = 0 if budget_bytes is None else MARGIN_BYTES
    _refuse_more_than(budget_bytes, device.capacity_bytes, device.name)
    return Target(
        name=device.name,
        capacity_bytes=device.capacity_bytes,
        limit_bytes=max((device.capacity_bytes if budget_bytes is None else budget_bytes) - kept_back_bytes, 0),
        limit_source=_WHOLE_MACHINE if budget_bytes is None else f"budget - {format_bytes(MARGIN_BYTES)} headroom",
        baseline=baseline(),
        has_budget=budget_bytes is not None,
        kept_back_bytes=kept_back_bytes,
    )


def _refuse_more_than(budget_bytes: int | None, capacity_bytes: int, name: str) -> None:
    if budget_bytes is not None and budget_bytes > capacity_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} is more than {name} has, {format_bytes(capacity_bytes)}: give "
            "that or less, or another device"
        )
