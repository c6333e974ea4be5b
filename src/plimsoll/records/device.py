"""What a machine has and how much of it a run may use."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Frozen, Record


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


class Budget(Frozen):
    """The line: bytes a run may use on its device and on the host; ``None`` means what the machine has."""

    device_bytes: int | None = None
    host_bytes: int | None = None
