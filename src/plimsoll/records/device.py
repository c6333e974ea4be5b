"""What a machine has and how much of it a run may use."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from plimsoll.records.base import Frozen, Record
from plimsoll.records.units import parse_bytes


class Limit(Frozen):
    """One bound on memory and where it comes from, e.g. ``cgroup v2 memory.max`` or ``RLIMIT_DATA``."""

    source: str
    bytes: int


class MemoryUse(Frozen):
    """What one process uses of one device's memory at one moment, in bytes.

    On the CPU ``used_bytes`` is private memory (RssAnon) and ``reserved_bytes`` what RLIMIT_DATA counts (VmData); on
    CUDA they are the allocator's allocated and reserved bytes. ``others_bytes`` is what other processes hold of the
    same device; ``None`` where it cannot be known.
    """

    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    limit_bytes: int | None = None
    others_bytes: int | None = None


class Device(Record):
    """A device as it really is: the capacity is the smallest of the hardware and every limit on this process."""

    record_kind: ClassVar[str] = "device"

    name: str
    kind: Literal["cpu", "cuda"]
    index: int = 0
    capacity_bytes: int
    free_bytes: int
    hardware_bytes: int
    limits: tuple[Limit, ...] = ()
    use: MemoryUse
    num_cores: int | None = None
    architecture: str | None = None
    notes: tuple[str, ...] = ()


class Machine(Record):
    """Every device of this machine and the libraries that drive them."""

    record_kind: ClassVar[str] = "machine"

    devices: tuple[Device, ...]
    versions: dict[str, str]


Size = Annotated[int, BeforeValidator(parse_bytes)]


class Budget(Frozen):
    """The line: bytes a run may use on its device and on the host; ``None`` means what the machine has.

    A job file calls them ``device`` and ``host`` and may give them as text, for example ``2GiB``.
    """

    device_bytes: Size | None = None
    host_bytes: Size | None = None
