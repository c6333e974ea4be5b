"""What is known of a GPU without having it at hand."""

from __future__ import annotations

from typing import Literal

from plimsoll.records.base import Frozen


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
