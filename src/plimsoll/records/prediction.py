"""What a training will need: the peak with its range, when it happens, what is alive at it, and what would fit."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.trace import Assumption, Category, Phase


class Estimate(Frozen):
    """A number of bytes with its range. The parts say how it is known, and add up to ``likely_bytes``."""

    likely_bytes: int
    low_bytes: int
    high_bytes: int
    traced_bytes: int = 0
    measured_bytes: int = 0
    modelled_bytes: int = 0
    assumed_bytes: int = 0

    def __add__(self, other: Estimate) -> Estimate:
        """Both together; the ranges add up."""
        return Estimate(**{name: getattr(self, name) + getattr(other, name) for name in Estimate.model_fields})


class Moment(Frozen):
    """Where in the training something happens; ``line`` is ``file:line``, empty texts are unknown."""

    step: int
    phase: Phase
    op: str
    module: str
    line: str


class Holding(Frozen):
    """Allocations alike that are alive at the peak, with where the first was made.

    They have the same category, shape, source line and module but for the numbers in its name, which are then ``*``.
    ``num_bytes`` is of all ``count`` of them; ``name`` is empty for what has none.
    """

    num_bytes: int
    count: int = 1
    category: Category
    shape: str
    name: str = ""
    made: Moment


class MemoryTimeline(Frozen):
    """Bytes over the events of a training, as columns of equal length, one row for each point kept.

    ``categories`` has one column for each category that occurs; they add up to ``used_bytes``. ``reserved_bytes`` is
    what the process has taken for it: the allocator's segments, context and libraries included. ``label`` says what
    ran at each point, for a person.
    """

    source: Literal["predicted", "measured"]
    phase: tuple[Phase, ...]
    step: tuple[int, ...]
    label: tuple[str, ...]
    categories: dict[Category, tuple[int, ...]]
    used_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    peak_row: int


class WhatIf(Frozen):
    """The same training with another micro-batch (samples) or sequence length (tokens)."""

    micro_batch: int
    sequence_length: int
    peak: Estimate
    fits: bool


class Answer(Frozen):
    """What fits: the largest micro-batch, the longest sequence, or the smallest device.

    ``value`` is ``None`` if nothing does; ``is_bound`` says that the search stopped at its upper end, so that more may
    fit too.
    """

    question: Literal["largest micro-batch", "longest sequence", "smallest device"]
    value: int | str | None
    peak: Estimate | None
    is_bound: bool = False


class Exchange(Frozen):
    """What one of several ranks exchanges in a step (its last one), and what that takes of its memory.

    ``gathered_bytes`` and ``scattered_bytes`` are of whole tensors: parameters as they are gathered, gradients as they
    are before each rank keeps its rows; ``added_up_bytes`` are gradients of which all ranks have all. The largest of
    each is whole at one time, as part of the peak. ``kept`` is what the library that exchanges keeps beside it.
    """

    num_ranks: int
    added_up_bytes: int
    gathered_bytes: int
    scattered_bytes: int
    largest_added_up_bytes: int
    largest_gathered_bytes: int
    largest_scattered_bytes: int
    kept: Estimate


class Prediction(Record):
    """The peak memory of a training before it runs.

    ``peak`` counts as ``limit_bytes`` does: on CUDA all of the process on the device (context, reserved segments), on
    the CPU its private memory. ``fits`` compares the likely value; ``verdict`` also looks at the range. Sizes of the
    batch are ``None`` where a function trains that decides them itself.
    """

    record_kind: ClassVar[str] = "prediction"

    subject: str
    device: str
    device_kind: Literal["cpu", "cuda"]
    capacity_bytes: int
    limit_bytes: int
    limit_source: str
    micro_batch: int | None
    sequence_length: int | None
    batch_size: int | None
    precision: str
    peak: Estimate
    allocated: Estimate
    reserved: Estimate
    context: Estimate
    host: Estimate | None
    exchange: Exchange | None = None
    moment: Moment
    parts: dict[Category, int]
    largest: tuple[Holding, ...]
    timeline: MemoryTimeline
    what_ifs: tuple[WhatIf, ...] = ()
    answers: tuple[Answer, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    runs_out_at: Moment | None = None
    versions: dict[str, str] = {}
    predict_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the likely peak is within the limit and the allocator could serve every request."""
        return self.runs_out_at is None and self.peak.likely_bytes <= self.limit_bytes

    @property
    def verdict(self) -> Literal["fits", "probably fits", "probably does not fit", "does not fit"]:
        """The answer in words; "probably" where the limit lies within the range."""
        if self.fits:
            return "fits" if self.peak.high_bytes <= self.limit_bytes else "probably fits"
        return "does not fit" if self.peak.low_bytes > self.limit_bytes else "probably does not fit"
