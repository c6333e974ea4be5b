"""A plan for inference: the location of each part of a model, the rows per pass, and the memory this needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.plan import Duration
from plimsoll.records.prediction import Estimate
from plimsoll.records.trace import Assumption

Place = Literal["device", "host", "disk"]
"""The location of weights between passes.

``device``: the memory that the budget counts (private memory for a CPU). ``host``: host memory of a GPU. ``disk``: the
checkpoint files, from which the kernel loads pages.
"""


class Part(Frozen):
    """A part of a model: a block, the embeddings, the output layer, or the remaining weights.

    ``is_streamed`` is true if every pass reads or copies all weights of the part. It is false for embedding tables, of
    which a pass reads single rows.
    """

    name: str
    num_bytes: int
    place: Place
    is_streamed: bool = False


class RejectedPlacement(Frozen):
    """A number of rows per pass that was considered and rejected. ``reason`` is a sentence with numbers."""

    micro_batch: int
    resident_bytes: int
    peak: Estimate
    rows_per_second: float
    reason: str


class InferencePlan(FormerNames, Record):
    """A plan for inference inside a budget.

    Sizes: ``limit_bytes`` is ``budget_bytes`` minus the headroom (``kept_back_bytes``). ``budget_bytes`` is ``None`` if
    the device is the only limit. ``host_free_bytes`` is host memory available for weights of a GPU model (``None``: not
    checked).

    Rows: ``longest_tokens`` (tokens of the longest input) and ``new_tokens`` (generated tokens) are per row.
    ``micro_batch`` is the number of rows per pass.

    Weights: ``dtype`` is the data type of most weights. If ``is_converted`` is true, all weights are converted to it.

    Time: ``pass_time`` is the time of a pass including all new tokens. Its parts ``compute_seconds`` and
    ``read_seconds`` overlap. ``read_bytes`` are read from the files or copied over the link in each pass.
    ``cached_bytes`` of the streamed weights stay in the page cache between passes. ``read_bytes_per_second`` is the
    speed of reading or copying; ``rate_source`` tells whether it was measured on the files or is from a table.

    If nothing fits, the record is the plan with the least memory, and ``smallest_budget_bytes`` is the budget for it.
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
        """True if the plan stays under its limit, as far as is known."""
        return self.smallest_budget_bytes is None

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def resident_bytes(self) -> int:
        """The bytes of the weights that stay on the device."""
        return self.bytes_in("device")

    @property
    def rows_per_second(self) -> float:
        """The predicted throughput in rows per second."""
        return self.micro_batch / self.pass_time.likely_seconds

    @property
    def limited_by(self) -> Literal["compute", "disk", "link"]:
        """The bottleneck of a pass: computation, reading from the disk, or copying over the link to the GPU."""
        if self.read_seconds <= self.compute_seconds:
            return "compute"
        return "disk" if self.bytes_in("disk") else "link"

    def bytes_in(self, place: Place) -> int:
        """Return the bytes of the weights in one location."""
        return sum(part.num_bytes for part in self.parts if part.place == place)

    def names_in(self, *places: Place) -> frozenset[str]:
        """Return the names of the parts in these locations."""
        return frozenset(part.name for part in self.parts if part.place in places)
