"""The backend of a CUDA or ROCm device, which measures and limits memory through torch's caching allocator.

The limit is torch's per-process memory fraction, which counts memory reserved by the caching allocator. It does not
count the CUDA context, or driver memory of NCCL, cuFFT and lazily loaded kernels (pytorch#107667). The size of the
context is subtracted from the budget if the driver reports it (NVML), and ignored otherwise.

Not covered: other allocators (``cudaMallocAsync``, pluggable allocators), pinned host memory, and private pools of
streams under CUDA graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

from plimsoll.device import oom_errors
from plimsoll.device.cpu import heap
from plimsoll.device.cpu.random import copy_host_state, restore_host_state
from plimsoll.device.cuda import allocator_settings, nvml
from plimsoll.errors import BudgetError, DeviceError
from plimsoll.records.device import Device, Limit, MemoryUse
from plimsoll.records.units import format_bytes

_NEARLY_FULL_BYTES = 1 << 30
"""Free memory below which an unspecific library error means out of memory. Libraries take memory of the driver, such
as about 500 MB for the kernels of cuDNN (pytorch#81620)."""


@final
class CudaBackend:
    """`Backend` for one CUDA or ROCm device.

    Raises:
        DeviceError: if torch was built without CUDA, or no visible device has this index.
    """

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        import torch

        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise DeviceError(
                f"cannot use cuda:{index}: this torch ({torch.__version__}) is built without CUDA; install a "
                "CUDA build (https://pytorch.org/get-started) or give the device as cpu"
            )
        num_devices = torch.cuda.device_count()
        if index >= num_devices:
            raise DeviceError(
                f"cannot use cuda:{index}: {num_devices} CUDA devices are visible to this process; check "
                "nvidia-smi and CUDA_VISIBLE_DEVICES, give a lower number, or give the device as cpu"
            )
        self._index = index

    def probe(self) -> Device:
        """Describe the device and its memory. ``notes`` lists facts that the driver does not report."""
        import torch

        properties = torch.cuda.get_device_properties(self._index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
        use, view = self.use(), self._driver_view()
        limits = (
            () if use.limit_bytes is None else (Limit(source="per-process memory fraction", bytes=use.limit_bytes),)
        )
        return Device(
            name=properties.name,
            kind="cuda",
            index=self._index,
            capacity_bytes=min([total_bytes, *(limit.bytes for limit in limits)]),
            free_bytes=free_bytes,
            hardware_bytes=total_bytes,
            limits=limits,
            use=use.model_copy(update={"others_bytes": view.others_bytes}),
            num_cores=properties.multi_processor_count,
            architecture=f"sm_{properties.major}{properties.minor}",
            notes=() if view.note is None else (view.note,),
        )

    def use(self) -> MemoryUse:
        """Return allocated, peak and reserved bytes of the caching allocator. `probe` adds use by other processes."""
        import torch

        fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        stats = torch.cuda.memory_stats(self._index)  # empty before the first allocation
        return MemoryUse(
            used_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            limit_bytes=int(fraction * self._total_bytes()) if fraction < 1 else None,
        )

    def baseline_bytes(self) -> int:
        """Return the bytes of the CUDA context, plus the memory that the allocator has reserved."""
        import torch

        self.synchronize()  # creates the context, so that its size is known
        self.release()
        return int(torch.cuda.memory_reserved(self._index)) + self._context_bytes()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes allocated now."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._index)

    @contextmanager
    def limited(self, budget_bytes: int) -> Iterator[None]:
        """Make the allocator raise in the ``with`` block if it would reserve more than the budget minus the context.

        Inside another limit, the tighter limit holds. The module docstring lists memory that this limit does not count.

        Raises:
            BudgetError: if more than the budget is already in use, or the device has less memory.
        """
        import torch

        in_use_bytes, context_bytes, total_bytes = self.baseline_bytes(), self._context_bytes(), self._total_bytes()
        if not in_use_bytes <= budget_bytes <= total_bytes:
            raise BudgetError(
                f"cannot limit cuda:{self._index} to {format_bytes(budget_bytes)}: this process uses "
                f"{format_bytes(in_use_bytes)} of it already and the device has {format_bytes(total_bytes)}; "
                "give a budget between the two"
            )
        previous = torch.cuda.get_per_process_memory_fraction(self._index)
        torch.cuda.set_per_process_memory_fraction(
            min(previous, (budget_bytes - context_bytes) / total_bytes), self._index
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(previous, self._index)

    def reserved(self, sizes: list[int]) -> None:
        """Return ``None``: memory cannot be kept free, because the use of other processes is unknown."""

    def without_holes(self) -> nullcontext[None]:
        """Do nothing. The allocator rounds sizes, so a later block of the same size fits where a block was freed."""
        return nullcontext()

    def release(self, last_resort: bool = False) -> None:
        """Collect garbage and return unused segments of the allocator to the driver.

        With ``last_resort``, later segments are expandable, unless `allocator_settings.clash` gives a reason against
        it.
        """
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        heap.trim()  # host memory may have run out instead
        if last_resort and allocator_settings.clash() is None:
            allocator_settings.set_up(f"{allocator_settings.GROWING}:True")

    def oom_family(self, error: BaseException) -> str | None:
        """Return the family of an out-of-memory error (see `oom_errors`), or ``None`` for any other error.

        Call this before memory is released: a disguise (see `oom_errors`) counts only while the device is nearly full.
        """
        return oom_errors.oom_family_on(error, self.is_nearly_full)

    def is_nearly_full(self) -> bool:
        """Return whether less than 1 GiB of the device is free, so that a library may not get the memory it needs."""
        import torch

        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return free_bytes < _NEARLY_FULL_BYTES

    def random_state(self) -> dict[str, Any]:
        """Return a copy of the generator states of this device and the host, and of cuDNN dropout if it is in use."""
        import torch

        from plimsoll.device.cuda import cudnn_dropout

        state = copy_host_state() | {"device": torch.cuda.get_rng_state(self._index)}
        dropout = cudnn_dropout.copied_state(self._index)
        return state if dropout is None else state | {"cudnn_dropout": dropout}

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `random_state` returned."""
        import torch

        from plimsoll.device.cuda import cudnn_dropout

        restore_host_state(state)
        if "device" in state:  # a checkpoint written on the CPU has none
            torch.cuda.set_rng_state(state["device"], self._index)
        if "cudnn_dropout" in state:
            cudnn_dropout.put_back(self._index, state["cudnn_dropout"])

    def synchronize(self) -> None:
        """Wait until all streams of the device have finished."""
        import torch

        torch.cuda.synchronize(self._index)

    def _total_bytes(self) -> int:
        import torch

        return int(torch.cuda.get_device_properties(self._index).total_memory)

    def _driver_view(self) -> nvml.DriverView:
        import torch

        return nvml.driver_view(f"GPU-{torch.cuda.get_device_properties(self._index).uuid}")

    def _context_bytes(self) -> int:
        """Return the bytes of this process on the device outside the caching allocator.

        The result is 0 if the driver does not report them.
        """
        import torch

        own_bytes = self._driver_view().own_bytes
        return 0 if own_bytes is None else max(0, own_bytes - torch.cuda.memory_reserved(self._index))
