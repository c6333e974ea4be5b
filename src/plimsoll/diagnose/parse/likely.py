"""The likely cause of an out-of-memory message, from its numbers only.

Errors of libraries and of the driver state no numbers, so their cause is unknown. For errors of the host, the cause is
a lack of host memory or of shared memory.
"""

from __future__ import annotations

from plimsoll.records.oom_text import Bytes, LikelyCause, OomText

_CONTEXT_BYTES = 3 << 29
"""Upper bound for a CUDA context with its kernels and library workspaces, which usually take 0.3 to 1.5 GiB."""

_ORDINARY_SHARE = 0.02
"""Assumed share of unused memory in any training: sizes are rounded up to 512 bytes, and segments to 2 or 20 MiB."""

_HOST = {
    "cpu_allocator_linux",
    "cpu_allocator_windows",
    "bad_alloc",
    "rust_abort",
    "arrow_memoryerror",
    "numpy_arraymemoryerror",
    "python_memoryerror",
    "os_enomem",
    "dataloader_worker_killed",
    "oom_killer_dmesg",
    "kubernetes_oomkilled",
    "slurm_oom",
}
_ABSURD_HOST_BYTES = 1 << 40

Causes = tuple[LikelyCause, LikelyCause | None]


def likely_causes(event: OomText, num_processes: int = 0) -> Causes:
    """Return the likely cause of an event, and the alternative cause or ``None``.

    Args:
        event: the parsed message, with its numbers.
        num_processes: number of processes that the text names in addition to "this process".
    """
    tried = event.tried_to_allocate
    if event.kind in _HOST:
        return "host_ram", "absurd_request" if (tried or 0) >= _ABSURD_HOST_BYTES else None
    if event.kind == "shm_bus_error":
        return "tiny_shm", None
    if tried is None:
        return "unknown", None
    return _on_device(event, tried, num_processes)


def _on_device(event: OomText, tried: Bytes, num_processes: int) -> Causes:
    limits = [limit for limit in (event.capacity, event.allowed_limit) if limit is not None]
    if not limits:
        return "unknown", None
    if tried > min(limits):
        return "absurd_request", None
    unused, free = event.derived_reserved_unallocated or 0, event.free
    if free is not None and free >= tried and event.allowed_limit is None:  # enough was free
        return "unknown", "fragmentation" if unused >= tried else None
    others_explain = _elsewhere(event, num_processes) + (free or 0) >= tried
    if unused >= tried and unused >= _ORDINARY_SHARE * min(limits):
        return "fragmentation", "other_process" if others_explain else "true_capacity"
    if others_explain and _elsewhere(event, num_processes) >= tried:
        return "other_process", "true_capacity"
    # Free and unused bytes would suffice as one block, so fragmentation remains possible.
    return "true_capacity", "fragmentation" if unused and unused + (free or 0) >= tried else None


def _elsewhere(event: OomText, num_processes: int) -> Bytes:
    """Return the bytes that other processes use on the device, as stated in the text or derived from its numbers.

    The result is 0 if they cannot be derived.
    """
    if event.other_process is not None:
        return event.other_process
    reserved = event.reserved_total
    if reserved is None and event.allocated_by_pytorch is not None:
        reserved = event.allocated_by_pytorch + (event.derived_reserved_unallocated or 0)
    if event.this_process is not None or event.capacity is None or event.free is None:
        return 0
    if reserved is None:
        return event.capacity - event.free if num_processes > 1 else 0
    return max(0, event.capacity - event.free - reserved - _CONTEXT_BYTES)
