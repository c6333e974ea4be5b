"""The CPU and host memory as a device. Its used memory is private memory, which ``RLIMIT_DATA`` limits.

Covered: Linux with glibc; with other C libraries, `heap` does nothing. `data_limit` describes the limit.

Not covered: mapped files and shared memory, which do not count; memory of DataLoader workers, which are separate
processes. torch is imported inside functions, so that a machine can be probed without it.
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
"""Memory is nearly full if less than this share of the budget is free. A failing oneDNN primitive requested a
scratchpad about as large as a batch: an LSTM with 512 tokens fails with 29 to 50 MiB of 290 MiB free. An unnecessary
retry costs less than a failed training."""


@final
class CpuBackend:
    """`Backend` for the CPU. Each instance measures a peak of its own. The limit applies to the whole process."""

    kind = "cpu"

    def __init__(self) -> None:
        self._peak = process.PeakCounter()

    def probe(self) -> Device:
        """Describe the processor, the memory available to this process, and every limit on it."""
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
        """Return the private memory of this process (``used_bytes``), its peak, and its data (``reserved_bytes``).

        Data is the memory that ``RLIMIT_DATA`` limits. This also adjusts the limit (see `data_limit.follow`), so call
        it once per step inside `limited`.
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
        """Return the bytes that count before training allocates memory.

        These are the interpreter, libraries with their threads, and the margin of `data_limit`.
        """
        _start_thread_pools()
        self.release()
        return process.private_memory().private_bytes + data_limit.MARGIN_BYTES

    def reset_peak(self) -> None:
        """Set the peak to the current memory use."""
        self._peak.reset()

    @contextmanager
    def limited(self, budget_bytes: int) -> Iterator[None]:
        """Make allocators raise before private memory of this process exceeds ``budget_bytes`` in the ``with`` block.

        Rust code (``tokenizers``) aborts the process instead. The calling line and the reason are then printed (see
        `aborts`).

        Raises:
            BudgetError: if more than the budget is already in use, or the machine or another limit allows less than the
                budget.
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
        """Check that allocations of these sizes fit together, and raise the limit by their total in the ``with`` block.

        The memory is allocated as a test and freed immediately. Its pages are never touched, so the test takes no
        physical memory but counts against the limit. Plain storages are used, because a trace would record tensors.
        """
        import torch

        storage: Any = torch.UntypedStorage
        [storage(num_bytes) for num_bytes in sizes]
        return data_limit.raised(sum(sizes))

    def without_holes(self) -> AbstractContextManager[None]:
        """Inside a limit, map large blocks separately in the ``with`` block, so that the heap gets no holes."""
        return data_limit.blocks_apart()

    def release(self, last_resort: bool = False) -> None:
        """Collect garbage, return free heap pages to the system, and clear oneDNN's error (see `onednn`).

        With ``last_resort`` inside `limited`, the heap then retains as little as possible, which slows down every step
        (see `heap`).
        """
        gc.collect()
        heap.trim()
        onednn.clear_error()
        if last_resort:
            data_limit.tighten_heap()

    def oom_family(self, error: BaseException) -> str | None:
        """Return the family of an out-of-memory error (see `oom_errors`), or ``None`` for any other error.

        Call this before memory is released: a disguise (see `oom_errors`) counts only while the limit is nearly
        reached.
        """
        return oom_errors.oom_family_on(error, self.is_nearly_full)

    def is_nearly_full(self) -> bool:
        """Return whether less than half of the memory is free.

        With a budget, this is half of the budget at the peak. Without a budget, it is half of the capacity now.
        """
        use = self.use()
        if use.limit_bytes is not None:
            return use.limit_bytes - use.peak_bytes < use.limit_bytes * _NEARLY_FULL_SHARE
        device = self.probe()
        return device.free_bytes < device.capacity_bytes * _NEARLY_FULL_SHARE

    def random_state(self) -> dict[str, Any]:
        """Return a copy of the states of the random number generators of torch (CPU), Python and numpy."""
        return copy_host_state()

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `random_state` returned."""
        restore_host_state(state)

    def synchronize(self) -> None:
        """Do nothing, because ops on the CPU have ended when their call returns."""


def _free_bytes(available_bytes: int) -> int:
    """Return the free bytes under the tightest limit: the machine's memory, control groups or resource limits.

    Args:
        available_bytes: the available memory of the machine.
    """
    free_bytes = [available_bytes, cgroup.free_bytes(), *(limit.bytes - used for limit, used in _resource_limits())]
    return max(0, min(free for free in free_bytes if free is not None))


def _resource_limits() -> list[tuple[Limit, int]]:
    """Return each resource limit that Plimsoll has not set, with the bytes of this process that count against it."""
    space, data = resource.getrlimit(resource.RLIMIT_AS)[0], data_limit.soft_limit_of_others_bytes()
    found = []
    if space != resource.RLIM_INFINITY:
        found.append((Limit(source="RLIMIT_AS (ulimit -v)", bytes=space), process.address_space_bytes()))
    if data is not None:
        found.append((Limit(source="RLIMIT_DATA (ulimit -d)", bytes=data), process.data_bytes()))
    return found


def processor_name() -> str:
    """Return the processor name that the kernel reports; if it reports none, the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()  # ARM writes no model name


def _start_thread_pools() -> None:
    """Start the thread pools of OpenMP, BLAS and autograd, and use oneDNN for the first time.

    libgomp ends the process if it cannot start a thread later, inside a limit. The size of oneDNN's kernel cache is set
    before, because oneDNN reads it at its first use.
    """
    import torch

    onednn.keep_few_kernels()
    matrix = torch.ones(512, 512, requires_grad=True)
    torch.nn.functional.gelu(matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
