"""The predicted memory of a training run: the peak with a range, its moment and content, and settings that fit."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record
from plimsoll.records.trace import Assumption, Category, Phase


class Estimate(Frozen):
    """A number of bytes and its range. Traced, measured, modelled and assumed bytes add up to ``likely_bytes``."""

    likely_bytes: int
    low_bytes: int
    high_bytes: int
    traced_bytes: int = 0
    measured_bytes: int = 0
    modelled_bytes: int = 0
    assumed_bytes: int = 0

    def __add__(self, other: Estimate) -> Estimate:
        """Return the sum of two estimates; their ranges are added, too."""
        return Estimate(**{name: getattr(self, name) + getattr(other, name) for name in Estimate.model_fields})


class Moment(Frozen):
    """A moment of a training run. ``line`` is ``file:line`` of user code. An empty string means unknown."""

    step: int
    phase: Phase
    op: str
    module: str
    line: str


class Holding(Frozen):
    """A group of similar allocations that are alive at the peak, and the moment when the first of them was made.

    The allocations have the same category, shape, source line and module. Numbers in the name of the module may differ
    and are shown as ``*``. ``num_bytes`` is the total of all ``count`` allocations. ``name`` is empty if the
    allocations have no name.
    """

    num_bytes: int
    count: int = 1
    category: Category
    shape: str
    name: str = ""
    made: Moment


class MemoryTimeline(Frozen):
    """Memory in bytes over the events of a training run, as columns of equal length. Some events may be left out.

    ``categories`` has one column per category, which add up to ``used_bytes``. ``reserved_bytes`` is the memory of the
    process: the allocator's segments, the context and libraries. ``label`` describes the code that ran at each event.
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
    """The predicted peak of the same training run with another micro-batch (samples) or sequence length (tokens)."""

    micro_batch: int
    sequence_length: int
    peak: Estimate
    fits: bool


class Answer(Frozen):
    """The result of a search for the largest micro-batch, the longest sequence, or the smallest device that fits.

    ``value`` is ``None`` if nothing fits. If ``is_bound`` is true, the search stopped at its upper bound, and a larger
    ``value`` may fit.
    """

    question: Literal["largest micro-batch", "longest sequence", "smallest device"]
    value: int | str | None
    peak: Estimate | None
    is_bound: bool = False


class Exchange(Frozen):
    """The data that one of several ranks exchanges in its last step, and the memory that the exchange needs.

    All sizes are sizes of whole tensors. ``gathered_bytes`` are parameters after gathering. ``scattered_bytes`` are
    gradients before each rank keeps only its rows. ``added_up_bytes`` are gradients that every rank keeps whole. The
    largest gathered, scattered and added-up tensors each exist whole at some moment, which the peak includes. ``kept``
    is the additional memory that the communication library holds.
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
    """The predicted peak memory of a training run.

    ``peak`` counts the same memory as ``limit_bytes``: on CUDA all memory of the process on the device (context,
    reserved segments), on the CPU its private memory. ``fits`` compares the likely value; ``verdict`` also considers
    the range. ``runs_out_at`` is the moment when the allocator cannot serve a request; ``None`` if it serves all.
    ``parts`` are the bytes at the peak by category, and ``largest`` the largest allocations. ``micro_batch``,
    ``sequence_length`` and ``batch_size`` are ``None`` if a training function of the user decides them.
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
        """True if the likely peak is within the limit and the allocator could serve every request."""
        return self.runs_out_at is None and self.peak.likely_bytes <= self.limit_bytes

    @property
    def verdict(self) -> Literal["fits", "probably fits", "probably does not fit", "does not fit"]:
        """The verdict on whether the run fits, with "probably" if the limit lies within the range of the peak."""
        if self.fits:
            return "fits" if self.peak.high_bytes <= self.limit_bytes else "probably fits"
        return "does not fit" if self.peak.low_bytes > self.limit_bytes else "probably does not fit"
