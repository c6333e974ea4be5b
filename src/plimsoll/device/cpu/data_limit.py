"""A limit on private memory of this process, which raises an error before the kernel would kill the process.

``RLIMIT_DATA`` makes the kernel refuse private memory, so that the allocator raises. Only the soft limit is set, so
that a child process can raise its own limit. Needs no torch.

Not covered:

- Mapped files and shared memory, which do not count.
- Child processes. A forked child may allocate `WORKER_ALLOWANCE_BYTES`; an executed child inherits the soft limit and
  may raise it.
- Systems other than Linux 4.7 or newer.
- Threads: libgomp ends the process if it cannot start one, so start every thread pool first (`CpuBackend.limited` does
  it). The whole stack of a Python thread, usually 8 MiB, counts.
- Memory that an allocator reserved earlier (pyarrow: 1 GiB): it may be filled until the next `follow`.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from plimsoll.device import process
from plimsoll.device.cpu import heap
from plimsoll.errors import BudgetError
from plimsoll.records.units import format_bytes

MARGIN_BYTES = 16 << 20
"""Part of the budget that stays free for untouched pages, which may be touched before the next `follow`."""

_READ_AGAIN_BYTES = 1 << 20
"""Least change in untouched bytes at which `follow` counts generated code again, because counting takes 0.5 ms."""

WORKER_ALLOWANCE_BYTES = 512 << 20
"""Bytes that a forked child, such as a DataLoader worker, may allocate in addition to inherited memory."""


@dataclass
class _Limit:
    budget_bytes: int
    untouched_bytes: int
    previous_soft_bytes: int
    code_at_first_bytes: int
    untouched_when_read_bytes: int
    new_code_bytes: int = 0
    raised_bytes: int = 0
    is_tight: bool = False


_IN_FORCE: list[_Limit] = []  # global, because RLIMIT_DATA is per process; the last limit is the tightest


@contextmanager
def limited(budget_bytes: int) -> Iterator[None]:
    """Keep resident private memory of this process below ``budget_bytes``. Inside another limit, the tighter one holds.

    Raises:
        BudgetError: if more than the budget minus `MARGIN_BYTES` is already in use.
    """
    memory = process.private_memory()
    if memory.private_bytes > budget_bytes - MARGIN_BYTES:
        least_bytes = memory.private_bytes + MARGIN_BYTES
        raise BudgetError(
            f"cannot limit this process to {format_bytes(budget_bytes)}: it uses "
            f"{format_bytes(memory.private_bytes)} of private memory already, and {format_bytes(MARGIN_BYTES)} are "
            f"kept back; give more than {format_bytes(least_bytes)}"
        )
    _raise_limit_in_children()
    tightest_bytes = min([budget_bytes, *(limit.budget_bytes for limit in _IN_FORCE)])
    all_untouched_bytes = memory.data_bytes - memory.private_bytes
    untouched_bytes = all_untouched_bytes - heap.free_bytes()  # free blocks of the heap will be touched
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not _IN_FORCE:
        heap.map_blocks_from(heap.FAST_BYTES)
    _IN_FORCE.append(_Limit(tightest_bytes, untouched_bytes, soft_bytes, process.code_bytes(), all_untouched_bytes))
    _apply(_IN_FORCE[-1])
    try:
        yield
    finally:
        del _IN_FORCE[-1:]  # the list is empty in a forked child
        _apply_last()
        if not _IN_FORCE:
            _set_soft(soft_bytes)
            heap.map_blocks_from(heap.USUAL_BYTES)


@contextmanager
def raised(num_bytes: int) -> Iterator[None]:
    """Raise the limit by ``num_bytes`` in the ``with`` block. Without a Plimsoll limit, do nothing.

    Memory that was just allocated and freed could otherwise be taken by another thread before the block uses it.
    Resident memory may then exceed the budget by the bytes that this thread took, at most ``num_bytes``.
    """
    if not _IN_FORCE:
        yield
        return
    limit = _IN_FORCE[-1]
    limit.raised_bytes += num_bytes
    _apply(limit)
    try:
        yield
    finally:
        limit.raised_bytes -= num_bytes
        _apply(limit)


@contextmanager
def with_untouched(num_bytes: int) -> Iterator[None]:
    """Do not count address space of ``num_bytes`` that the ``with`` block maps, until its pages are written.

    This is for a file that is mapped copy-on-write. Writes are announced by `count_untouched` or detected by `follow`.
    """
    _add_untouched(num_bytes)
    is_taken = False
    try:
        yield
        is_taken = True
    finally:
        if not is_taken:
            _add_untouched(-num_bytes)


def count_untouched(num_bytes: int) -> None:
    """End the exemption of ``num_bytes`` by `with_untouched`, so that they count against the limit.

    Call this before the pages are written.

    Raises:
        MemoryError: if the limit has less free memory. The bytes then stay exempt.
    """
    if not _IN_FORCE:
        return
    limit = _IN_FORCE[-1]
    free_bytes = _soft_bytes(limit) - process.data_bytes()
    if num_bytes > free_bytes:
        raise MemoryError(
            f"out of memory: {format_bytes(num_bytes)} of weights that are mapped from a file will be written, which "
            f"takes as much private memory, but the budget of {format_bytes(limit.budget_bytes)} has only "
            f"{format_bytes(max(free_bytes, 0))} left"
        )
    _add_untouched(-num_bytes)


def tighten_heap() -> None:
    """Make the heap retain as little freed memory as possible until the limit ends.

    Later calls of `set_up_heap` do not change this.
    """
    if _IN_FORCE:
        _IN_FORCE[-1].is_tight = True
        heap.map_blocks_from(heap.TIGHT_BYTES)


def set_up_heap(mapped_from_bytes: int | None) -> None:
    """Set the block size from which the heap maps blocks separately. A tightened heap stays as it is.

    Args:
        mapped_from_bytes: the block size; ``None`` makes the heap retain all freed memory.
    """
    if _IN_FORCE and _IN_FORCE[-1].is_tight:
        heap.map_blocks_from(heap.TIGHT_BYTES)
    elif mapped_from_bytes is None:
        heap.keep_freed()
    else:
        heap.map_blocks_from(mapped_from_bytes)


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Map blocks of 128 KiB or more separately in the ``with`` block, which should allocate long-lived blocks.

    When these blocks are freed, they leave no holes in the heap. An aligned block does not fit into a hole of
    equal size, and all blocks of torch are aligned. If neither Plimsoll nor the user has set a limit, do nothing.
    """
    if not _IN_FORCE and soft_limit_of_others_bytes() is None:
        yield  # glibc's dynamic threshold could not be restored
        return
    before = heap.threshold_bytes()
    heap.map_blocks_from(heap.TIGHT_BYTES)
    try:
        yield
    finally:
        set_up_heap(before)


def follow(memory: process.PrivateMemory) -> None:
    """Adjust the limit to the current memory use. Call it once per step.

    The limit is lowered if pages that were counted as untouched have been touched, and raised for generated code.

    Args:
        memory: the current memory use.
    """
    if not _IN_FORCE:
        return
    limit = _IN_FORCE[-1]
    untouched_bytes = memory.data_bytes - memory.private_bytes
    if abs(untouched_bytes - limit.untouched_when_read_bytes) >= _READ_AGAIN_BYTES:
        limit.untouched_when_read_bytes = untouched_bytes
        # oneDNN compiles kernels for each new shape, and maps a hundred times the address space that they fill: 3 MiB
        # for each text length in bfloat16. A nearly used budget would hold only three lengths. If code is freed and its
        # addresses are reused between two calls, the second call notices.
        limit.new_code_bytes = process.code_bytes() - limit.code_at_first_bytes  # negative if code was freed
    limit.untouched_bytes = min(limit.untouched_bytes, untouched_bytes - limit.new_code_bytes)
    _apply(limit)


def budget_in_force_bytes() -> int | None:
    """Return the budget of the innermost `limited` block in bytes, or ``None`` outside such blocks."""
    return _IN_FORCE[-1].budget_bytes if _IN_FORCE else None


def soft_limit_of_others_bytes() -> int | None:
    """Return the ``RLIMIT_DATA`` that applied before any `limited` block, in bytes.

    ``None`` if it was unlimited.
    """
    soft_bytes = _IN_FORCE[0].previous_soft_bytes if _IN_FORCE else resource.getrlimit(resource.RLIMIT_DATA)[0]
    return soft_bytes if soft_bytes != resource.RLIM_INFINITY else None


def _apply(limit: _Limit) -> None:
    _set_soft_within_others(_soft_bytes(limit))


def _add_untouched(num_bytes: int) -> None:
    for limit in _IN_FORCE:
        limit.untouched_bytes += num_bytes
    _apply_last()


def _apply_last() -> None:
    if _IN_FORCE:
        _apply(_IN_FORCE[-1])


def _soft_bytes(limit: _Limit) -> int:
    # The kernel counts address space (VmData). A process with torch has about 150 MiB of it that is never touched:
    # thread stacks and the .bss of libraries. While they stay untouched, private memory cannot exceed the budget.
    bytes_now = limit.budget_bytes + limit.raised_bytes
    return bytes_now + limit.untouched_bytes + limit.new_code_bytes - MARGIN_BYTES


def _set_soft_within_others(soft_bytes: int) -> None:
    others_bytes = soft_limit_of_others_bytes()
    _set_soft(soft_bytes if others_bytes is None else min(soft_bytes, others_bytes))


def _set_soft(soft_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@functools.cache
def _raise_limit_in_children() -> None:
    os.register_at_fork(after_in_child=_leave_in_child)


def _leave_in_child() -> None:
    # The child inherits address space and limit of its parent, so it could not allocate any memory.
    if _IN_FORCE:
        _set_soft_within_others(process.data_bytes() + WORKER_ALLOWANCE_BYTES)
        _IN_FORCE.clear()
