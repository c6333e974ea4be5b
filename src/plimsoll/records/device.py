"""The memory and speed of a machine, and the part of the memory that a run may use."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from plimsoll.records.base import Frozen, Record
from plimsoll.records.units import parse_bytes


class Limit(Frozen):
    """A limit on memory and its source, such as ``cgroup v2 memory.max`` or ``RLIMIT_DATA``."""

    source: str
    bytes: int


class MemoryUse(Frozen):
    """The memory that one process uses on one device at one moment, in bytes.

    On the CPU, ``used_bytes`` is private memory (RssAnon) and ``reserved_bytes`` the memory that RLIMIT_DATA counts
    (VmData). On CUDA they are the allocator's allocated and reserved bytes. ``peak_bytes`` is the peak of
    ``used_bytes``. ``limit_bytes`` is the limit set for this process; ``None`` without a limit. ``others_bytes`` is the
    memory of other processes on the same device; ``None`` if unknown.
    """

    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    limit_bytes: int | None = None
    others_bytes: int | None = None


class Device(Record):
    """The state of a device. ``capacity_bytes`` is the minimum of the hardware and all limits on this process."""

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
    """All devices of this machine, and the versions of the libraries and drivers for them."""

    record_kind: ClassVar[str] = "machine"

    devices: tuple[Device, ...]
    versions: dict[str, str]


Size = Annotated[int, BeforeValidator(parse_bytes)]


class Budget(Frozen):
    """The memory budget: bytes that a run may use on its device and on the host; ``None`` means all available memory.

    In a job file, the fields are ``device`` and ``host``; a value may be a string such as ``2GiB``.
    """

    device_bytes: Size | None = None
    host_bytes: Size | None = None


class Flops(Frozen):
    """Peak operations per second by data type, for dense matrices with accumulation in fp32.

    ``None``: the GPU does not support this type in hardware, or the GPU's clock rate is unknown.
    """

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None


class DeviceSpec(Frozen):
    """The specification of a GPU. ``None`` means unknown.

    ``capacity_bytes`` and ``capacity_high_bytes`` are the minimum and maximum total memory that CUDA reported under
    Linux, with ECC in its factory setting. Both are below ``nominal_bytes``, the number in the name of the card, and
    depend on the driver. The CUDA context is driver memory of a process, outside torch's allocator.
    ``context_low_bytes`` and ``context_high_bytes`` are its range, because it grows with the kernels that are loaded.
    ``host_link_bytes_per_second`` is the theoretical rate of the card's connector in one direction.
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
