"""What a device can do in a second: what the time of a training step follows from."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record

MovingKind = Literal["plain", "strided", "transcendental", "normalize", "random", "gather"]
"""How an op handles bytes: one after the other; in another order than they lie; with exponentials or the like for each
element; over rows, twice; with random numbers; rows picked by index."""


class Point(Frozen):
    """One measured point of a curve."""

    at: float
    rate: float


Curve = tuple[Point, ...]

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""A collective over a tensor: add it up on all ranks, make it of the rows of each, add it up and keep some rows."""


def rate_at(curve: Curve, at: float) -> float:
    """Read a curve between its points, which are straight lines in logarithms; constant beyond its ends.

    >>> rate_at((Point(at=1, rate=10), Point(at=100, rate=1000)), 10)
    100.0
    """
    place = bisect_left(curve, at, key=lambda point: point.at)
    if place in {0, len(curve)}:
        return curve[min(place, len(curve) - 1)].rate
    before, after = curve[place - 1], curve[place]
    share = log(at / before.at) / log(after.at / before.at)
    return round(exp(log(before.rate) + share * log(after.rate / before.rate)), 9)


class Speed(Record):
    """Rates of one device.

    ``flops_per_second`` is a curve for each type: over the operations of a product by the bytes it moves, which are few
    where a side of a matrix is small. ``bytes_per_second`` is one for each kind of op: over the bytes that it moves,
    more than the caches hold or less. A type or kind that is missing is as ``float32`` or ``plain``.
    ``fresh_seconds_per_byte`` is what memory costs that was not touched before (pages are cleared).

    The call of an op keeps the processor busy, whatever the op does: for ``op_seconds`` if it is called bare, as an
    optimizer's are; for ``module_op_seconds`` in a forward, where modules are called and autograd takes note; for
    ``backward_op_seconds`` where torch's own code calls it, as autograd in a backward. Its kernel keeps the device busy
    for at least ``kernel_seconds``. Where ``overlaps``, a call only puts a kernel into the device's queue, and copies
    over the link run beside both. ``link_bytes_per_second`` is to and from memory outside the device: of a GPU the
    host's, of a processor files; ``host_bytes_per_second`` what the processor itself does in that memory.
    ``spread`` is how far off a step may be, as a share.
    """

    record_kind: ClassVar[str] = "speed"
    schema_version: ClassVar[int] = 2

    device: str
    source: Literal["measured", "table"]
    flops_per_second: dict[str, Curve]
    bytes_per_second: dict[MovingKind, Curve]
    op_seconds: float
    module_op_seconds: float
    backward_op_seconds: float
    kernel_seconds: float = 0.0
    fresh_seconds_per_byte: float = 0.0
    link_bytes_per_second: float
    host_bytes_per_second: float
    overlaps: bool = False
    spread: float


class ExchangeSpeed(Record):
    """What exchanges between so many ranks take.

    ``bytes_per_second`` is over the bytes of the whole tensor, as it is when it is gathered or before it is scattered.
    ``call_seconds`` is an exchange of almost nothing, and ``agree_seconds`` the question that goes before each exchange
    of a sharded model, whether all ranks got there.
    """

    record_kind: ClassVar[str] = "exchange-speed"

    device: str
    source: Literal["measured", "assumed"]
    num_ranks: int
    bytes_per_second: dict[ExchangeKind, Curve]
    call_seconds: float
    agree_seconds: float

    def seconds_of(self, kind: ExchangeKind, num_bytes: int) -> float:
        """Return what one exchange of a tensor of so many bytes takes."""
        agreed = 0.0 if kind == "all_reduce" else self.agree_seconds  # gradients are added up after one question
        return self.call_seconds + agreed + num_bytes / rate_at(self.bytes_per_second[kind], num_bytes or 1)
