"""How a predicted trace and a measured one differ: in the peak, at the first op that does, and in what is alive then.

``Calibration`` is what was learned from a target's measured runs, kept in a file between runs.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from plimsoll.records.base import Frozen, Record
from plimsoll.records.prediction import Moment
from plimsoll.records.trace import Category


class Counters(Frozen):
    """What the device counted while a training was recorded; the recorder itself sees the storages only.

    On CUDA ``peak_bytes`` is what torch's allocator had given out and ``reserved_bytes`` its segments, at their peaks;
    on the CPU they are private memory and what ``RLIMIT_DATA`` counts. ``baseline_bytes`` was in use before the
    training. ``samples`` are seconds since the beginning and bytes in use.
    """

    device: str
    baseline_bytes: int
    peak_bytes: int
    reserved_bytes: int
    samples: tuple[tuple[float, int], ...] = ()


class Side(Frozen):
    """The peak of one trace: its bytes, by category, and the moment."""

    peak_bytes: int
    parts: dict[Category, int]
    moment: Moment


class Block(Frozen):
    """One storage: its bytes, and the shape of the first tensor in it."""

    num_bytes: int
    shape: str


class Difference(Frozen):
    """An op at which two traces are not alike: what only one of them allocated or gave back at it.

    ``row`` is the op's row in the trace it is in, the predicted one if it is in both.
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
    """What one op of one module has alive at the peak of each trace, in one category."""

    op: str
    module: str
    category: Category
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Bytes that were measured beyond those predicted."""
        return self.measured_bytes - self.predicted_bytes


class Comparison(Record):
    """A prediction against a measurement of the same training.

    ``groups`` are those that differ, the largest first; all of them (``num_groups``) add up to the difference of the
    peaks. ``num_differing_ops`` counts ops that allocated or freed otherwise, also those in one trace only.
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
        """Whether the peaks are equal to the byte."""
        return self.predicted.peak_bytes == self.measured.peak_bytes

    @property
    def error_bytes(self) -> int:
        """Bytes by which the measured peak is above the predicted one."""
        return self.measured.peak_bytes - self.predicted.peak_bytes

    @property
    def relative_error(self) -> float:
        """The error as a share of the measured peak; 0 where nothing was measured."""
        return self.error_bytes / self.measured.peak_bytes if self.measured.peak_bytes else 0.0


class Learned(Frozen):
    """The mean and the range of one number over the runs it was measured in."""

    num_runs: int = Field(ge=1)
    mean: float
    low: float
    high: float

    def with_run(self, value: float) -> Learned:
        """Return what is known after one more run."""
        num_runs = self.num_runs + 1
        return Learned(
            num_runs=num_runs,
            mean=self.mean + (value - self.mean) / num_runs,
            low=min(self.low, value),
            high=max(self.high, value),
        )


class Target(Frozen):
    """What was learned from the measured runs on one kind of target.

    ``None`` is not known yet. ``live_ratio`` is measured over predicted peak of live bytes. The other two need
    counters: ``baseline_bytes`` is what was in use before the training, ``beyond_ratio`` what the process took on top
    of that, over the measured peak of live bytes: the allocator's rounding and kept blocks, and what kernels and
    libraries hold. ``step_ratios`` are measured over predicted seconds of a step, and ``peak_ratios`` of the process's
    peak, by the techniques that were in force, in order and joined by ``+`` (a micro-batch does not count).
    """

    live_ratio: Learned | None = None
    baseline_bytes: Learned | None = None
    beyond_ratio: Learned | None = None
    step_ratios: dict[str, Learned] = {}
    peak_ratios: dict[str, Learned] = {}


class Calibration(Record):
    """What was learned from runs about predictions, by the kind of target they were lowered to."""

    record_kind: ClassVar[str] = "calibration"

    targets: dict[str, Target] = {}
