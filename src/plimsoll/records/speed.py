"""The rates of a device, from which step times are predicted."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record

MovingKind = Literal["plain", "strided", "transcendental", "normalize", "random", "gather"]
"""The way that an op accesses bytes.

``plain``: in order. ``strided``: not in memory order. ``transcendental``: with an exponential or similar function per
element. ``normalize``: two passes over each row. ``random``: generating random numbers. ``gather``: rows picked by
index.
"""


class Point(Frozen):
    """A measured point of a curve: the rate at position ``at``. See `Speed` for the curves."""

    at: float
    rate: float


Curve = tuple[Point, ...]

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""A collective operation of all ranks on a tensor.

``all_reduce`` adds tensors up on all ranks. ``all_gather`` joins the rows of all ranks. ``reduce_scatter`` adds tensors
up and keeps some rows on each rank.
"""


def rate_at(curve: Curve, at: float) -> float:
    """Return the rate at a position of a curve, interpolated on logarithmic axes and constant beyond the ends.

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
    """The rates of one device.

    ``flops_per_second`` has a curve for each data type, over the arithmetic intensity (operations per byte moved). The
    intensity is low if a side of a matrix is short. ``bytes_per_second`` has a curve for each kind of op, over the
    bytes moved, because caches hold only small tensors. A data type without a curve uses the curve of ``float32``, and
    a kind of op without a curve uses the curve of ``plain``. ``fresh_seconds_per_byte`` is the cost of memory that is
    used for the first time, because the kernel clears pages.

    A call of an op occupies the CPU for a time that depends on the caller. This time is ``op_seconds`` if Python code
    calls the op directly, as in an optimizer. It is ``module_op_seconds`` in a forward pass, including module calls and
    autograd, and ``backward_op_seconds`` in a backward pass. The kernel of the op occupies the device for at least
    ``kernel_seconds``. If ``overlaps`` is true, a call only queues the kernel, and copies over the link run
    concurrently.

    ``link_bytes_per_second`` is the rate to memory outside the device: host memory of a GPU, files of a CPU.
    ``host_bytes_per_second`` is the rate at which the CPU itself accesses this memory. ``spread`` is the relative
    uncertainty of a predicted step time.
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
    """The cost of collectives between ``num_ranks`` ranks.

    ``bytes_per_second`` is a curve over the bytes of the whole tensor, after gathering or before scattering.
    ``call_seconds`` is the time to exchange a tensor of almost no bytes. ``agree_seconds`` is the time to check that
    all ranks have reached an exchange; a sharded model does so before each exchange.
    """

    record_kind: ClassVar[str] = "exchange-speed"

    device: str
    source: Literal["measured", "assumed"]
    num_ranks: int
    bytes_per_second: dict[ExchangeKind, Curve]
    call_seconds: float
    agree_seconds: float

    def seconds_of(self, kind: ExchangeKind, num_bytes: int) -> float:
        """Return the seconds of one exchange of a tensor of ``num_bytes`` bytes."""
        agreed = 0.0 if kind == "all_reduce" else self.agree_seconds  # gradients share one check
        return self.call_seconds + agreed + num_bytes / rate_at(self.bytes_per_second[kind], num_bytes or 1)
