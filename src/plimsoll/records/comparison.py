"""Differences between a predicted trace and a measured trace: in the peak, at the first differing op, and by module.

``Calibration`` stores corrections learned from measured runs for each kind of device.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from plimsoll.records.base import Frozen, Record
from plimsoll.records.prediction import Moment
from plimsoll.records.trace import Category


class Counters(Frozen):
    """Memory counters of the device during a recorded training run.

    They include memory that the trace does not list, because a trace has only the storages of tensors.

    On CUDA, ``peak_bytes`` and ``reserved_bytes`` are the peaks of allocated and reserved memory. On the CPU they are
    the peaks of private memory and of the memory that ``RLIMIT_DATA`` counts. ``baseline_bytes`` was in use before the
    training. ``samples`` are pairs of seconds since the start and bytes in use.
    """

    device: str
    baseline_bytes: int
    peak_bytes: int
    reserved_bytes: int
    samples: tuple[tuple[float, int], ...] = ()


class Side(Frozen):
    """The peak of the predicted or the measured trace: its bytes in total and by category, and when it was reached."""

    peak_bytes: int
    parts: dict[Category, int]
    moment: Moment


class Block(Frozen):
    """One storage: its bytes, and the shape of the first tensor in it."""

    num_bytes: int
    shape: str


class Difference(Frozen):
    """An op at which two traces differ: the storages that were allocated or freed in only one of the traces.

    ``row`` is the op's row in the predicted trace, or in the measured trace if the op is only there. ``is_predicted``
    and ``is_measured`` are true if the op is in the predicted and in the measured trace. The op allocated
    ``only_predicted`` and freed ``freed_only_predicted`` in the predicted trace alone. ``only_measured`` and
    ``freed_only_measured`` are the same for the measured trace.
    """

    row: int
    moment: Moment
    is_predicted: bool
    is_measured: bool
    only_predicted: tuple[Block, ...] = ()
    only_measured: tuple[Block, ...] = ()
    freed_only_predicted: tuple[Block, ...] = ()
    freed_only_measured: tuple[Block, ...] = ()


class Group(Frozen):
    """The live bytes of one category that one op of one module has allocated, at the peak of each trace."""

    op: str
    module: str
    category: Category
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """The measured bytes minus the predicted bytes."""
        return self.measured_bytes - self.predicted_bytes


class Comparison(Record):
    """A comparison of the predicted and the measured memory of the same training run.

    ``lowered_to`` is the kind of device that the prediction was made for, such as ``cpu`` or ``cuda 8.0``.
    ``groups`` lists the groups that differ, largest first. All ``num_groups`` groups add up to the difference of the
    peaks. ``num_differing_ops`` counts ops that allocated or freed different storages, including ops in only one trace.
    ``first`` is the first of these ops, or ``None`` if no op differs.
    """

    record_kind: ClassVar[str] = "comparison"

    lowered_to: str
    predicted: Side
    measured: Side
    num_ops: int
    num_differing_ops: int
    first: Difference | None
    groups: tuple[Group, ...]
    num_groups: int
    counters: Counters | None = None

    @property
    def is_equal(self) -> bool:
        """True if the peaks are equal to the byte."""
        return self.predicted.peak_bytes == self.measured.peak_bytes

    @property
    def error_bytes(self) -> int:
        """The measured peak minus the predicted peak."""
        return self.measured.peak_bytes - self.predicted.peak_bytes

    @property
    def relative_error(self) -> float:
        """The error as a share of the measured peak; 0 if nothing was measured."""
        return self.error_bytes / self.measured.peak_bytes if self.measured.peak_bytes else 0.0


class Learned(Frozen):
    """The mean and range of a correction over the runs that measured it."""

    num_runs: int = Field(ge=1)
    mean: float
    low: float
    high: float

    def with_run(self, value: float) -> Learned:
        """Return the mean and range updated with the ``value`` of one more run."""
        num_runs = self.num_runs + 1
        return Learned(
            num_runs=num_runs,
            mean=self.mean + (value - self.mean) / num_runs,
            low=min(self.low, value),
            high=max(self.high, value),
        )


class Target(Frozen):
    """The corrections learned from measured runs on one kind of device. ``None`` means not known yet.

    ``live_ratio`` is the ratio of measured to predicted peak of live bytes. ``baseline_bytes`` and ``beyond_ratio`` are
    known only from runs with counters. ``baseline_bytes`` is the memory in use before the training. ``beyond_ratio`` is
    the additional memory of the process, divided by the measured peak of live bytes. This memory is the allocator's
    rounding and cached blocks, kernels and libraries.

    ``step_ratios`` and ``peak_ratios`` are ratios of measured to predicted step time and peak of the process. Their
    keys are the names of the techniques in order, joined by ``+``, without the micro-batch.
    """

    live_ratio: Learned | None = None
    baseline_bytes: Learned | None = None
    beyond_ratio: Learned | None = None
    step_ratios: dict[str, Learned] = {}
    peak_ratios: dict[str, Learned] = {}


class Calibration(Record):
    """Corrections of predictions that were learned from measured runs.

    The key of a target is its kind of device: ``cpu``, or ``cuda`` with the compute capability, such as ``cuda 8.0``.
    """

    record_kind: ClassVar[str] = "calibration"

    targets: dict[str, Target] = {}
