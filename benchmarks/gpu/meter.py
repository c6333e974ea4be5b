"""Memory readings of a device: torch's allocator, the driver, NVML. On the CPU all values are None.

Needs only torch; ``pynvml`` is used if it is installed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors of a single run that do not end the recording; torch's own errors are RuntimeErrors."""

MOST_EVENTS = 1_000_000
_ACTIONS = {
    "alloc": "a", "free_requested": "r", "free_completed": "f", "segment_alloc": "s", "segment_free": "x",
    "segment_map": "m", "segment_unmap": "u", "snapshot": "n", "oom": "o",
}  # fmt: skip


class Meter:
    """Reads one device; create it before CUDA is initialized, so that it knows the earlier use."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self._nvml = _nvml_of_first_device() if self.is_cuda else None
        self.used_before_bytes = self.nvml_used_bytes()
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.init()

    # -- the driver ----------------------------------------------------------------------------------------------------

    def nvml_used_bytes(self) -> int | None:
        """Return the memory of all processes together, according to NVML."""
        if self._nvml is None:
            return None
        library, handle = self._nvml
        try:
            return int(library.nvmlDeviceGetMemoryInfo(handle).used)
        except library.NVMLError:
            return None

    def nvml_process_bytes(self) -> int | None:
        """Return this process's memory, or None if NVML does not report it (as in most containers)."""
        if self._nvml is None:
            return None
        library, handle = self._nvml
        try:
            running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        except library.NVMLError:
            return None
        return next((one.usedGpuMemory for one in running if one.pid == os.getpid()), None)

    def driver_version(self) -> str | None:
        if self._nvml is None:
            return None
        version = self._nvml[0].nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version

    def used_bytes(self) -> int | None:
        """Return the memory of all processes together, according to CUDA."""
        if not self.is_cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def outside_bytes(self) -> int | None:
        """Return the memory outside this process's allocator: its context, and other processes."""
        used = self.used_bytes()
        return None if used is None else used - torch.cuda.memory_reserved(self.device)

    # -- the allocator -------------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Free all cached memory, and reset the counters."""
        gc.collect()
        if not self.is_cuda:
            return
        torch.cuda.synchronize(self.device)
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.reset_accumulated_memory_stats(self.device)

    def wait(self) -> None:
        """Wait for all queued work, because errors appear late."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.is_cuda:
            self.wait()
            torch.cuda.reset_peak_memory_stats(self.device)

    def now(self) -> tuple[int | None, int | None, int | None]:
        """Return the allocated and reserved bytes, and the peak of the allocated ones."""
        if not self.is_cuda:
            return None, None, None
        stats = torch.cuda.memory_stats(self.device)
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        return tuple(stats.get(name, 0) for name in names)  # type: ignore[return-value]

    def peaks(self) -> dict[str, int | None]:
        """Return the peak numbers of a run."""
        names = {
            "peak_allocated_bytes": "allocated_bytes.all.peak",
            "peak_reserved_bytes": "reserved_bytes.all.peak",
            "peak_requested_bytes": "requested_bytes.all.peak",
            "peak_inactive_split_bytes": "inactive_split_bytes.all.peak",
            "num_retries": "num_alloc_retries",
            "num_ooms": "num_ooms",
            "num_segments": "segment.all.peak",
        }
        if not self.is_cuda:
            return dict.fromkeys(names)
        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        return {name: stats.get(key) for name, key in names.items()}

    def measure(self, work: Callable[[], Any]) -> tuple[Any, dict[str, int | None]]:
        """Call a function; return its result, the bytes that stay allocated, and the peak above the previous value."""
        self.reset_peak()
        before = self.now()[0]
        result = work()
        if before is None:
            return result, {"kept_bytes": None, "peak_bytes": None}
        torch.cuda.synchronize(self.device)
        allocated, _, peak = self.now()
        assert allocated is not None
        assert peak is not None
        return result, {"kept_bytes": allocated - before, "peak_bytes": peak - before}

    @contextmanager
    def limited_to(self, limit_bytes: int | None) -> Iterator[None]:
        """Limit the allocator's reserved memory during the block."""
        if limit_bytes is None or not self.is_cuda:
            yield
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    @contextmanager
    def events_into(self, row: dict[str, Any], wanted: bool) -> Iterator[None]:
        """Record every event of the allocator in the block into ``row["events"]``."""
        if not (wanted and self.is_cuda):
            yield
            return
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
        try:
            yield
            torch.cuda.synchronize(self.device)
            traces = torch.cuda.memory._snapshot()["device_traces"]
            row["events"] = compact_events(traces[self.device.index or 0])
        finally:
            torch.cuda.memory._record_memory_history(None)

    def is_alive(self) -> bool:
        """Return whether the device still answers: after some errors, this process cannot use it any more."""
        if not self.is_cuda:
            return True
        try:
            torch.zeros(1, device=self.device).item()
        except RuntimeError:
            return False
        return True


def compact_events(trace: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return an allocator's events in columns: a letter and a size for each, and the number of the address."""
    actions, sizes, blocks, streams = [], [], [], []
    numbers: dict[int, int] = {}
    for event in trace:
        if (letter := _ACTIONS.get(event["action"])) is None:
            continue
        address = event.get("addr", event.get("device_free", -1))
        actions.append(letter)
        sizes.append(event.get("size", 0))
        blocks.append(numbers.setdefault(address, len(numbers)))
        streams.append(event.get("stream", 0))
    known = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
    columns: dict[str, Any] = {"action": "".join(actions), "size_bytes": sizes, "block": blocks}
    return columns | ({"stream": [known[stream] for stream in streams]} if len(known) > 1 else {})


def _nvml_of_first_device() -> tuple[Any, Any] | None:
    """Return NVML and its handle of the first visible CUDA device, or None without pynvml."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, _handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0")
    except FAILURES as error:
        print(f"no NVML: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 -- pynvml's own errors have no base but Exception
        print(f"no NVML: {error}", file=sys.stderr)
    return None


def _handle(library: Any, name: str) -> Any:
    return library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else library.nvmlDeviceGetHandleByUUID(name)


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
