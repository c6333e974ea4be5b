"""Measurement of a real training run: a trace from the recorder that predictions use, and the device's memory counters.

    with measuring("cuda") as run:
        train_three_steps()
    run.trace(), run.counters

Prediction and measurement use the same recorder, so that they can be compared op by op (`compare`). On CUDA, the
counters are the peaks of the caching allocator. On the CPU, a thread samples private memory.

Recording costs some 20 microseconds and 500 bytes of host memory per op, so measure a few steps, not a run. `recorder`
lists operations that it cannot see. Not covered: several devices, other processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from plimsoll.device.base import Backend, backend_for
from plimsoll.memory.recorder import Recorder
from plimsoll.memory.snapshot import AllocatorRecord, recorded
from plimsoll.records.comparison import Counters
from plimsoll.records.trace import Trace

_SAMPLE_SECONDS = 0.02


class Measurement:
    """A training run that is being recorded or has been recorded; created by `measuring`."""

    def __init__(self, device: str, backend: Backend) -> None:
        is_elsewhere = device != "cpu"
        self.device = device
        self.recorder = Recorder(on_host=_is_on_host if is_elsewhere else None)
        self.allocator = AllocatorRecord()
        self._backend = backend
        self._baseline_bytes = backend.use().used_bytes
        self._counters: Counters | None = None
        self._samples: list[tuple[float, int]] = []
        self._started = time.monotonic()

    @property
    def counters(self) -> Counters:
        """Memory counters of the device for the whole block, or until now while the block runs."""
        return self._counters or self._read()

    def know_batch(self, batch: Any) -> Any:
        """Mark the tensors of a batch as inputs, as `DryRun.fake_batch` does, and return the batch."""
        leaves, _ = tree_flatten_with_path(batch)
        self.recorder.know(((keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)), "inputs")
        return batch

    def trace(self) -> Trace:
        """Return the trace recorded so far."""
        return self.recorder.trace("measured", self._backend.kind)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(stop,), name="plimsoll-measure", daemon=True)
        self._backend.reset_peak()
        self._sample()
        thread.start()
        try:
            yield
            self._backend.synchronize()
        finally:
            stop.set()
            thread.join()
            self._sample()
            self._counters = self._read()

    def _sample_until(self, stop: threading.Event) -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            with contextlib.suppress(MemoryError):  # a sample may not fit near a limit; skip it
                self._sample()

    def _sample(self) -> None:
        self._samples.append((time.monotonic() - self._started, self._backend.use().used_bytes))

    def _read(self) -> Counters:
        use = self._backend.use()
        return Counters(
            device=self.device,
            baseline_bytes=self._baseline_bytes,
            peak_bytes=max(use.peak_bytes, *(used_bytes for _, used_bytes in self._samples)),
            reserved_bytes=self._peak_reserved_bytes(use.reserved_bytes),
            samples=tuple(self._samples),
        )

    def _peak_reserved_bytes(self, now_bytes: int) -> int:
        if self._backend.kind != "cuda":
            return now_bytes
        import torch

        return int(torch.cuda.memory_stats(self.device).get("reserved_bytes.all.peak", now_bytes))


@contextmanager
def measuring(device: str = "cpu", with_allocator_record: bool = False) -> Iterator[Measurement]:
    """Record the training in the block. Every ``optimizer.step()`` ends a step.

    Args:
        device: device of the training: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        with_allocator_record: whether to record the events of CUDA's caching allocator, too (see `snapshot`).

    Raises:
        DeviceError: if there is no such device.
    """
    backend = backend_for(device)
    backend.release()
    run = Measurement(device, backend)
    run.recorder.step, run.recorder.counts_steps = 1, True
    with ExitStack() as stack:
        if with_allocator_record:
            run.allocator = stack.enter_context(recorded(int(device.partition(":")[2] or 0)))
        stack.enter_context(run._counted())
        stack.enter_context(run.recorder)
        yield run


def measure_training(train: Callable[[Measurement], Any], device: str = "cpu") -> Trace:
    """Run a function that trains, and return the trace of its allocations.

    Args:
        train: trains for a few steps on real tensors, like the argument of `plimsoll.memory.trace.trace_training`.
        device: device of the training.

    Raises:
        DeviceError: if there is no such device.
    """
    with measuring(device) as run:
        train(run)
    return run.trace()


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
