"""The CPU and the host's memory as a device: private memory is what counts, ``RLIMIT_DATA`` is what limits it.

Covered: Linux with glibc (elsewhere `heap` knows and does nothing). The limit is described in `data_limit`. Not
covered: mapped files and shared memory, which do not count; the memory of DataLoader workers, which are processes of
their own. torch is imported where it is used, so that a machine can be probed without it.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, final

from plimsoll.device import aborts, oom_errors, process
from plimsoll.device.cpu import cgroup, data_limit, heap, onednn
from plimsoll.device.cpu.random import copy_host_state, restore_host_state
from plimsoll.errors import BudgetError
from plimsoll.records.device import Device, Limit, MemoryUse
from plimsoll.records.units import format_bytes

_NEARLY_FULL_SHARE = 1 / 2
"""Of the budget. A primitive of oneDNN that fails wanted a scratchpad about as large as a batch: an LSTM of 512 tokens
fails so with 29 to 50 MiB of 290 MiB left. A retry too many costs less than a training that ends."""


@final
class CpuBackend:
    """`Backend` for the CPU; every instance counts its own peak, the limit is the process's."""

    kind = "cpu"

    def __init__(self) -> None:
        self._peak = process.PeakCounter()

    def probe(self) -> Device:
        """Describe the processor and the memory that this process may use, with every limit on it."""
        import psutil

        memory = psutil.virtual_memory()
        limits = (*cgroup.limits(), *(limit for limit, _ in _resource_limits()))
        return Device(
            name=processor_name(),
            kind="cpu",
            capacity_bytes=min([memory.total, *(limit.bytes for limit in limits)]),
            free_bytes=_free_bytes(memory.available),
            hardware_bytes=memory.total,
            limits=limits,
            use=self.use(),
            num_cores=len(os.sched_getaffinity(0)),
            architecture=platform.machine(),
        )

    def use(self) -> MemoryUse:
        """Read private memory (``used_bytes``), its peak, and what ``RLIMIT_DATA`` counts (``reserved_bytes``).

        It also keeps the limit true (see `data_limit.follow`): call it once per step inside `limited`.
        """
        memory = process.private_memory()
        data_limit.follow(memory)
        return MemoryUse(
            used_bytes=memory.private_bytes,
            peak_bytes=self._peak.read(memory.private_bytes),
            reserved_bytes=memory.data_bytes,
            limit_bytes=data_limit.budget_in_force_bytes(),
        )

    def baseline_bytes(self) -> int:
        """Count the interpreter, the libraries with their threads, and what `data_limit` keeps back."""
        _start_thread_pools()
        self.release()
        return process.private_memory().private_bytes + data_limit.MARGIN_BYTES

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        self._peak.reset()

    @contextmanager
    def limited(self, budget_bytes: int) -> Iterator[None]:
        """Make every allocator raise before this process's private memory passes ``budget_bytes``; undone on exit.

        Code in Rust (``tokenizers``) ends the process instead: it is then printed where and why (see `aborts`).

        Raises:
            BudgetError: if more than the budget is in use already, or the machine or a limit on it has less.
        """
        capacity_bytes = self.probe().capacity_bytes
        if budget_bytes > capacity_bytes:
            raise BudgetError(
                f"cannot limit this process to {format_bytes(budget_bytes)}: this machine lets it use at most "
                f"{format_bytes(capacity_bytes)}; give that or less (`plimsoll probe` lists the limits)"
            )
        _start_thread_pools()
        self.release()
        with aborts.told_where(budget_bytes), data_limit.limited(budget_bytes):
            yield

    def reserved(self, sizes: list[int]) -> AbstractContextManager[None]:
        """Allocate blocks of these sizes at once, and free them; the context raises the limit by as much.

        Pages that are not touched take no memory, but they count against the limit. Storages are no tensors, and not in
        a trace.
        """
        import torch

        storage: Any = torch.UntypedStorage
        [storage(num_bytes) for num_bytes in sizes]
        return data_limit.raised(sum(sizes))

    def without_holes(self) -> AbstractContextManager[None]:
        """Inside a limit, map blocks apart that fit no free part of the heap."""
        return data_limit.blocks_apart()

    def release(self, last_resort: bool = False) -> None:
        """Collect garbage, give the heap's free pages back, and let oneDNN try again (see `onednn`).

        ``last_resort``: inside `limited`, also keep as little as possible from now on, which costs time in every step
        (see `heap`).
        """
        gc.collect()
        heap.trim()
        onednn.clear_error()
        if last_resort:
            data_limit.tighten_heap()

    def oom_family(self, error: BaseException) -> str | None:
        """Name the kind of out-of-memory error this is (see `oom_errors`), or return ``None``.

        Call it before the memory is released: a disguise counts only while the limit is nearly reached.
        """
        return oom_errors.oom_family_on(error, self.is_nearly_full)

    def is_nearly_full(self) -> bool:
        """Whether less than half of the budget, or without one of the machine, was left at the peak."""
        use = self.use()
        if use.limit_bytes is not None:
            return use.limit_bytes - use.peak_bytes < use.limit_bytes * _NEARLY_FULL_SHARE
        device = self.probe()
        return device.free_bytes < device.capacity_bytes * _NEARLY_FULL_SHARE

    def random_state(self) -> dict[str, Any]:
        """Copy the state of torch's CPU generator, Python's and numpy's."""
        return copy_host_state()

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Put back a state that `random_state` returned."""
        restore_host_state(state)

    def synchronize(self) -> None:
        """Return at once: the CPU has done what it was given."""


def _free_bytes(available_bytes: int) -> int:
    """Return the least that the machine, its control groups and the resource limits still have."""
    free_bytes = [available_bytes, cgroup.free_bytes(), *(limit.bytes - used for limit, used in _resource_limits())]
    return max(0, min(free for free in free_bytes if free is not None))


def _resource_limits() -> list[tuple[Limit, int]]:
    """Pair each resource limit that others set on this process with what counts against it."""
    space, data = resource.getrlimit(resource.RLIMIT_AS)[0], data_limit.soft_limit_of_others_bytes()
    found = []
    if space != resource.RLIM_INFINITY:
        found.append((Limit(source="RLIMIT_AS (ulimit -v)", bytes=space), process.address_space_bytes()))
    if data is not None:
        found.append((Limit(source="RLIMIT_DATA (ulimit -d)", bytes=data), process.data_bytes()))
    return found


def processor_name() -> str:
    """Return what the kernel calls the processor, or else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()  # ARM writes no model name


def _start_thread_pools() -> None:
    """Use OpenMP, BLAS and autograd once in this thread: where libgomp cannot start a thread it ends the process.

    It is the first use of oneDNN too, before which it is told how much it may keep.
    """
    import torch

    onednn.keep_few_kernels()
    matrix = torch.ones(512, 512, requires_grad=True)
    torch.nn.functional.gelu(matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
