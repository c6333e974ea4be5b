"""A parser for one out-of-memory message: its kind, and every number that it states.

`plimsoll.device.oom_errors` decides which texts mean that memory ran out, and assigns them to families of errors. This
module maps each family to a kind, and reads the numbers. Sources: the messages of ``c10/cuda/CUDACachingAllocator.cpp``
and ``CUDAMallocAsyncAllocator.cpp`` of torch 0.4 to 2.13, of its HIP, XPU and MPS allocators, of
``c10/core/impl/alloc_cpu.cpp``, numpy, and the Linux kernel. All of them print binary units. MPS and numpy also write
these units as "GB".

Before torch 1.4, "cached" was the reserved memory that was not allocated. Since then it is all reserved memory. A size
of 2^63 bytes or more is an underflow (WSL, an unset limit) and is ignored. If the text mentions only one "Process N has
...", this is usually the failed process itself, in a container that hides its id. It is another process only if the
text also has "this process has ...". Not handled: texts in languages other than English.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from plimsoll.device.oom_errors import family_of_text
from plimsoll.diagnose.parse.likely import likely_causes
from plimsoll.records.oom_text import Bytes, OomText

NOT_OOM = "jvm/other_not_oom"
"""The kind of a text without an out-of-memory error."""

_MOST_CHARACTERS = 4000
# Does not match in the middle of a number: a sequence of n digits would otherwise be scanned n times.
_SIZE = r"(?<![\d.])(\d+(?:\.\d+)?) ?([KMGTPE]i?B|[Bb]ytes?)\b"

_KINDS = {
    "cuda-async": "cuda_mallocasync",
    "hip": "hip",
    "xpu": "xpu",
    "mps": "mps",
    "nccl": "nccl",
    "cublas": "cublas_alloc",
    "cudnn": "cudnn",
    "cuda-driver": "cuda_driver",
    "shared-memory": "shm_bus_error",
    "worker-killed": "dataloader_worker_killed",
    "bad-alloc": "bad_alloc",
    "rust": "rust_abort",
    "arrow": "arrow_memoryerror",
    "os": "os_enomem",
}
_OLD_CUDA = re.compile(r"\(GPU \d+; [^)]* total capacity")
_NUMPY = re.compile(r"ArrayMemoryError|Unable to allocate [\d.]+ \w+ for an array")
_PREFIX = re.compile(r"^[\s#>*|]+", re.MULTILINE)

# Each field with the texts that state it; the first match counts.
_FIELDS = {
    "tried_to_allocate": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"Requested *: {_SIZE}",
        rf"Unable to allocate {_SIZE} for an array",
        rf"memory allocation of {_SIZE} failed",
        r"(?:alloc|posix_memalign) of size (\d+)() failed",  # bytes: the message has no unit
    ),
    "capacity": (
        rf"total capac(?:i?)ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Device limit *: {_SIZE}",
    ),
    "free": (
        rf"of which {_SIZE} is free",
        rf"already allocated; {_SIZE} free",
        rf"Free \(according to CUDA\) *: {_SIZE}",
    ),
    "allocated_by_pytorch": (
        rf"allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"Currently allocated *: {_SIZE}",
        rf"MPS allocated: {_SIZE}",
    ),
    "reserved_unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached"),
    "reserved_total": (rf"{_SIZE} reserved in total by PyTorch",),
    "this_process": (rf"this process has {_SIZE} memory in use",),
    "allowed_limit": (
        rf"max allowed: {_SIZE}",
        rf"{_SIZE} allowed;",
        rf"PyTorch limit \(set by user-supplied memory fraction\) *: {_SIZE}",
    ),
}
_PATTERNS = {field: tuple(map(re.compile, texts)) for field, texts in _FIELDS.items()}
_OTHERS = re.compile(rf"\bProcess \d+ has {_SIZE} memory in use")
_DEVICE = re.compile(r"\bGPU (\d+)|\bon device (\d+)")


def event_of(text: str, family: str | None = None) -> OomText:
    """Parse one out-of-memory message.

    Args:
        text: the message and the text around it, of any number of lines.
        family: the family from `plimsoll.device.oom_errors`; ``None`` if it must be determined from the text.

    Returns:
        the event; its kind is `NOT_OOM` if memory did not run out.
    """
    family = family or family_of_text(text)
    if family is None:
        return nothing_in(text)
    flat = " ".join(_PREFIX.sub("", text).split())
    kind = _kind(family, flat)
    numbers: dict[str, Any] = {field: _first(patterns, flat) for field, patterns in _PATTERNS.items()}
    others = [size for match in _OTHERS.finditer(flat) if (size := _bytes(match[1], match[2])) is not None]
    if numbers["this_process"] is not None and others:
        numbers["other_process"] = sum(others)
    numbers["derived_reserved_unallocated"] = _unallocated(numbers)
    device = _DEVICE.search(flat)
    event = OomText(
        kind=kind,
        subformat=_subformat(kind, flat),
        is_oom=True,
        device_index=int(device[1] or device[2]) if device else None,
        text=text[:_MOST_CHARACTERS],
        **numbers,
    )
    likely, other = likely_causes(event, num_processes=len(others))
    return event.model_copy(update={"likely_cause": likely, "likely_cause_alt": other})


def nothing_in(text: str) -> OomText:
    """Return an event of kind `NOT_OOM`, for a text that does not show that memory ran out."""
    return OomText(kind=NOT_OOM, is_oom=False, text=text[:_MOST_CHARACTERS])


def has_numbers(text: str) -> bool:
    """Return whether a text states the size of the failed allocation."""
    return any(pattern.search(" ".join(text.split())) for pattern in _PATTERNS["tried_to_allocate"])


def _kind(family: str, flat: str) -> str:
    if family == "cuda":
        return "cuda_allocator_old_format" if _OLD_CUDA.search(flat) else "cuda_allocator_new_format"
    if family == "cpu-allocator":
        return "cpu_allocator_linux" if "can't allocate memory" in flat else "cpu_allocator_windows"
    if family == "memory-error":
        return "numpy_arraymemoryerror" if _NUMPY.search(flat) else "python_memoryerror"
    if family == "oom-killer":
        if "OOMKilled" in flat:
            return "kubernetes_oomkilled"
        return "slurm_oom" if "slurm" in flat or "oom-kill event" in flat else "oom_killer_dmesg"
    return _KINDS[family]


def _subformat(kind: str, flat: str) -> str | None:
    if kind == "cuda_allocator_new_format":
        if "capacty" in flat:
            return "2.1-2.2 capacty"
        if "PYTORCH_ALLOC_CONF" in flat:
            return "2.9+ PYTORCH_ALLOC_CONF"
        return "2.2.1-2.8 capacity" if "total capacity" in flat else None
    if kind == "cuda_allocator_old_format":
        if " cached" in flat:
            return "0.4.1-1.3 cached"
        return "1.9-2.0 hint" if "max_split_size_mb" in flat else "1.4-1.8 reserved"
    return "thc_runtime_error_2" if kind == "cuda_driver" and "cuda runtime error (2)" in flat else None


def _first(patterns: tuple[re.Pattern[str], ...], flat: str) -> Bytes | None:
    match = next(filter(None, (pattern.search(flat) for pattern in patterns)), None)
    return None if match is None else _bytes(match[1], match[2])


def _bytes(number: str, unit: str) -> Bytes | None:
    exponent = 0 if unit[:1] in {"", "B", "b"} else "KMGTPE".index(unit[0]) + 1
    size = Decimal(number[:40]) * 1024**exponent
    return round(size) if size < 1 << 63 else None


def _unallocated(numbers: dict[str, Bytes | None]) -> Bytes | None:
    stated, total, allocated = (
        numbers[name] for name in ("reserved_unallocated", "reserved_total", "allocated_by_pytorch")
    )
    if stated is None and total is not None and allocated is not None:
        return max(0, total - allocated)
    return stated
