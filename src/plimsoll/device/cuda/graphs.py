"""A captured CUDA graph: work that is launched as a whole, with a private memory pool.

    graph = CudaGraph(torch.device("cuda", 0))
    loss = graph.capture(one_pass)     # records the work without running it
    graph.replay()                     # runs it
    graph.release()

Memory that its kernels allocate comes from a private pool of torch's allocator and stays reserved until `release`. Each
replay draws random numbers from the current state of the device's default generator, and advances that state. Does NOT
cover work on several streams, or generators that a program creates itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaGraph:
    """A CUDA graph that is captured once and can then be replayed.

    Args:
        device: the device on which the captured work runs.

    Attributes:
        num_bytes: bytes that the graph's pool has reserved. Between replays, torch does not count them as allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> T:
        """Capture the kernels that ``work`` launches, and return its result: tensors that each replay fills.

        Raises:
            RuntimeError: if the work contains something that cannot be captured, such as a synchronization.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the pool cannot use cached blocks
        before_bytes = torch.cuda.memory_reserved(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream), _told_of_no_capture():
            # Data loading threads may allocate pinned memory during the capture.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                self._end()
        self.num_bytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return result

    def replay(self) -> None:
        """Launch the captured work on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free the memory of the graph, which cannot be replayed afterwards."""
        self._graph.reset()
        torch._C._cuda_clearCublasWorkspaces()  # the workspace of the capture is in the pool
        torch.cuda.empty_cache()

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch (2.11 to 2.13) leaves the pool open and the generator of random numbers capturing
            # (``CUDAGraph::capture_end``, aten/src/ATen/cuda/CUDAGraph.cpp).
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            _close(index, self._pool)
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())  # the old state works only in a capture
            raise


def _close(index: int, pool: tuple[int, int]) -> None:
    """Close and release a memory pool that a failed capture has left open. Do nothing if it is closed."""
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:  # the pool was not open
        return
    torch._C._cuda_releasePool(index, pool)


@contextmanager
def _told_of_no_capture() -> Iterator[None]:
    """Make ``torch.cuda.is_current_stream_capturing`` return ``False`` in the ``with`` block.

    Otherwise, transformers would create other attention masks during a capture.
    """
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
