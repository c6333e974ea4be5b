"""Where the parts of a model lie while it reads or writes text, how many rows go at once, and what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.plan import Duration
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Assumption

Place = Literal["device", "host", "disk"]
"""Where weights are between the passes: in the memory that the budget counts (of a CPU that is private memory); in the
host's memory, beside a GPU; or in the files of the checkpoint, from which the kernel brings pages."""


class Part(Frozen):
    """A part of a model: one block, the embeddings, the output layer, or what is left.

    ``is_streamed``: all of it is read or copied in every pass; the tables of embeddings are read by row instead.
    """

    name: str
    num_bytes: int
    place: Place
    is_streamed: bool = False


class RejectedPlacement(Frozen):
    """A number of rows that was considered and not taken; ``reason`` is a sentence with numbers."""

    micro_batch: int
    resident_bytes: int
    peak: Estimate
    rows_per_second: float
    reason: str


class InferencePlan(FormerNames, Record):
    """How a model is applied inside a budget.

    ``limit_bytes`` is what is left of ``budget_bytes`` without what is kept back (``kept_back_bytes``);
    ``budget_bytes`` is ``None`` where there is no budget but the device. ``longest_tokens`` and ``new_tokens`` are of
    a row, ``micro_batch`` is the rows of one pass. ``dtype`` is that of most weights, to which all are converted where
    ``is_converted``. ``pass_time`` is of a pass with all its new tokens: ``compute_seconds`` and ``read_seconds`` of it
    run beside one another. ``read_bytes`` are what a pass brings from the files or over the link; ``cached_bytes`` of
    the streamed weights stay in the page cache between passes. ``read_bytes_per_second`` was ``measured`` on the files
    themselves, or is of a table. ``host_free_bytes`` is what the host of a GPU has for weights; ``None`` was not
    checked.

    Where nothing fits, the plan is the one that needs least, and ``smallest_budget_bytes`` is what it would take.
    """

    record_kind: ClassVar[str] = "inference-plan"
    schema_version: ClassVar[int] = 2
    also_reads: ClassVar[frozenset[int]] = frozenset({1})
    former_names: ClassVar[Mapping[str, str]] = {"host_room_bytes": "host_free_bytes"}

    model: str
    task: str
    device: str
    device_kind: Literal["cpu", "cuda"]
    dtype: str
    is_converted: bool = False
    quantize: Literal["int8", "int4"] | None = None
    budget_bytes: int | None
    limit_bytes: int
    limit_source: str
    kept_back_bytes: int = 0
    host_free_bytes: int | None = None
    parts: tuple[Part, ...]
    longest_tokens: int
    new_tokens: int = 0
    micro_batch: int
    peak: Estimate
    pass_time: Duration
    compute_seconds: float
    read_seconds: float = 0.0
    read_bytes: int = 0
    cached_bytes: int = 0
    read_bytes_per_second: float | None = None
    rate_source: Literal["measured", "table", "none"] = "none"
    rejected: tuple[RejectedPlacement, ...] = ()
    smallest_budget_bytes: int | None = None
    assumptions: tuple[Assumption, ...] = ()
    num_traces: int = 0
    plan_seconds: float = 0.0
    versions: dict[str, str] = {}

    @property
    def fits(self) -> bool:
        """Whether it stays under its limit, as far as is known."""
        return self.smallest_budget_bytes is None

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay on the device."""
        return self.bytes_in("device")

    @property
    def rows_per_second(self) -> float:
        """What is done in a second."""
        return self.micro_batch / self.pass_time.likely_seconds

    @property
    def limited_by(self) -> Literal["compute", "disk", "link"]:
        """What a pass waits for."""
        if self.read_seconds <= self.compute_seconds:
            return "compute"
        return "disk" if self.bytes_in("disk") else "link"

    def bytes_in(self, place: Place) -> int:
        """Bytes of the weights in one place."""
        return sum(part.num_bytes for part in self.parts if part.place == place)

    def names_in(self, *places: Place) -> frozenset[str]:
        """The names of the parts in these places."""
        return frozenset(part.name for part in self.parts if part.place in places)
