"""A limit on this process's private memory that raises an error where the kernel would kill.

``RLIMIT_DATA`` makes the kernel refuse private memory, so that the allocator raises. Only the soft limit is set: a
child can raise its own. Needs no torch.

Not covered: mapped files and shared memory (they do not count), memory of child processes (a forked child may take
`WORKER_ALLOWANCE_BYTES`; one that is executed inherits the soft limit and may raise it), systems other than Linux 4.7
or newer. libgomp ends the process where it cannot start a thread: start every thread pool before
(`CpuBackend.limited` does). A Python thread takes its whole stack, usually 8 MiB, from the limit. What an allocator has
reserved before the limit begins (pyarrow: 1 GiB) it may fill until the next `follow`.
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
"""Kept back for pages counted as untouched that are touched before the next `follow`."""

_READ_AGAIN_BYTES = 1 << 20
"""Change of the untouched bytes at which `follow` counts new code: reading the maps takes half a millisecond."""

WORKER_ALLOWANCE_BYTES = 512 << 20
"""What a forked child, such as a DataLoader worker, may allocate on top of what it inherits."""


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


_IN_FORCE: list[_Limit] = []  # of this process: RLIMIT_DATA is the process's, not an object's; the last is the tightest


@contextmanager
def limited(budget_bytes: int) -> Iterator[None]:
    """Keep this process's resident private memory under ``budget_bytes``; inside another limit the tighter one holds.

    Raises:
        BudgetError: if more is in use already.
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
    untouched_bytes = all_untouched_bytes - heap.free_bytes()  # the heap's free blocks will be touched
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not _IN_FORCE:
        heap.map_blocks_from(heap.FAST_BYTES)
    _IN_FORCE.append(_Limit(tightest_bytes, untouched_bytes, soft_bytes, process.code_bytes(), all_untouched_bytes))
    _apply(_IN_FORCE[-1])
    try:
        yield
    finally:
        del _IN_FORCE[-1:]  # none is left in a forked child
        _apply_last()
        if not _IN_FORCE:
            _set_soft(soft_bytes)
            heap.map_blocks_from(heap.USUAL_BYTES)


@contextmanager
def raised(num_bytes: int) -> Iterator[None]:
    """Let this process have so many bytes past the limit while the block runs; without a limit of ours do nothing.

    For what was just allocated and freed: between that and its use another thread could take it. Resident memory then
    passes the budget by what that thread took, and by no more than ``num_bytes``.
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
    """Have address space that the block takes, of so many bytes, count only as far as it is touched.

    For a file that is mapped copy on write. What will be touched of it is announced (`count_untouched`) or seen by
    `follow`.
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
    """Count so many of the untouched bytes from now on: they are about to be written.

    Raises:
        MemoryError: if the limit does not allow them; they stay uncounted.
    """
    if not _IN_FORCE:
        return
    limit = _IN_FORCE[-1]
    free_bytes = _soft_bytes(limit) - process.data_bytes()
    if num_bytes > free_bytes:
        raise MemoryError(
            f"out of memory: {format_bytes(num_bytes)} of weights that are mapped from a file are to be written, for "
            f"which this process takes memory of its own, and its budget of {format_bytes(limit.budget_bytes)} has "
            f"{format_bytes(max(free_bytes, 0))} left"
        )
    _add_untouched(-num_bytes)


def tighten_heap() -> None:
    """Keep as little freed memory as possible until the limit ends, whatever `set_up_heap` is asked for."""
    if _IN_FORCE:
        _IN_FORCE[-1].is_tight = True
        heap.map_blocks_from(heap.TIGHT_BYTES)


def set_up_heap(mapped_from_bytes: int | None) -> None:
    """Map blocks from a size on, or with ``None`` keep all that is freed: unless the heap has been tightened."""
    if _IN_FORCE and _IN_FORCE[-1].is_tight:
        heap.map_blocks_from(heap.TIGHT_BYTES)
    elif mapped_from_bytes is None:
        heap.keep_freed()
    else:
        heap.map_blocks_from(mapped_from_bytes)


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Map blocks of 128 KiB and more, for what stays and comes where other blocks go; without a limit do nothing.

    An aligned block, as all of torch's are, does not fit into the hole that one of its size has left in the heap.
    """
    if not _IN_FORCE and soft_limit_of_others_bytes() is None:
        yield  # glibc's own threshold, which moves, would not come back
        return
    before = heap.threshold_bytes()
    heap.map_blocks_from(heap.TIGHT_BYTES)
    try:
        yield
    finally:
        set_up_heap(before)


def follow(memory: process.PrivateMemory) -> None:
    """Make the limit true again; call once per step with a new reading.

    It is lowered where pages counted as untouched have been touched, and raised where new code takes addresses.
    """
    if not _IN_FORCE:
        return
    limit = _IN_FORCE[-1]
    untouched_bytes = memory.data_bytes - memory.private_bytes
    if abs(untouched_bytes - limit.untouched_when_read_bytes) >= _READ_AGAIN_BYTES:
        limit.untouched_when_read_bytes = untouched_bytes
        # oneDNN compiles kernels for each new shape, which take a hundred times the addresses that they fill: 3 MiB for
        # each length of text in bfloat16, and a budget that is nearly used would hold three lengths. Code that goes and
        # addresses that are filled in its place between two calls are seen at the second.
        limit.new_code_bytes = process.code_bytes() - limit.code_at_first_bytes  # below 0: some has gone
    limit.untouched_bytes = min(limit.untouched_bytes, untouched_bytes - limit.new_code_bytes)
    _apply(limit)


def budget_in_force_bytes() -> int | None:
    """Return the budget that holds now, in bytes, ``None`` outside `limited`."""
    return _IN_FORCE[-1].budget_bytes if _IN_FORCE else None


def soft_limit_of_others_bytes() -> int | None:
    """Return the ``RLIMIT_DATA`` that was there before any `limited` of this process, ``None`` where there was none."""
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
    # The kernel counts address space (VmData), and a process with torch has some 150 MiB of it that is never touched:
    # thread stacks and the .bss of libraries. As long as these stay so, resident private memory cannot pass the budget.
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
    # The child begins with its parent's address space and limit, and could not allocate anything.
    if _IN_FORCE:
        _set_soft_within_others(process.data_bytes() + WORKER_ALLOWANCE_BYTES)
        _IN_FORCE.clear()
