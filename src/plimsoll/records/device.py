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


class Flops(Frozen):
    """Peak floating-point (or integer) operations a second by data type: dense, products added up in fp32.

    ``None``: the GPU has no units for this type, or its clock is not known.
    """

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None


class DeviceSpec(Frozen):
    """A GPU's facts; ``None`` is "not known".

    ``capacity_bytes`` is the smallest total memory that CUDA was seen to report under Linux with ECC as the card is
    sold, ``capacity_high_bytes`` the largest: both lie below ``nominal_bytes``, the number in the name of the card, and
    depend on the driver. The context is what the driver takes for a process outside torch's allocator, as a range: it
    grows with the kernels that are loaded.
    ``host_link_bytes_per_second`` is the theoretical rate of the card's own connector in one direction.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["cuda"] = "cuda"
    architecture: str | None
    nominal_bytes: int | None = None
    capacity_bytes: int
    capacity_high_bytes: int
    capacity_source: str
    context_low_bytes: int | None = None
    context_high_bytes: int | None = None
    context_source: str | None = None
    memory_bytes_per_second: int | None = None
    host_link_bytes_per_second: int | None = None
    flops: Flops = Flops()
    num_sms: int | None = None
    shared_memory_per_sm_bytes: int | None = None
    cublas_workspace_bytes: int | None = None
    sources: tuple[str, ...] = ()
