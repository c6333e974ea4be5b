"""One captured CUDA graph: work that is launched once as a whole, with the memory that belongs to it.

    graph = CudaGraph(torch.device("cuda", 0))
    loss = graph.capture(one_pass)     # nothing runs yet
    graph.replay()                     # now it has
    graph.release()

What its kernels allocate comes from a private pool of torch's allocator and stays reserved until `release`. Random
numbers of the device's default generator are drawn from where it is at each replay, and advance it. Does NOT cover work
on several streams of its own, and the generators that a program makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaGraph:
    """A graph that is captured once and then replayed.

    Args:
        device: where the work runs.

    Attributes:
        num_bytes: what its pool has reserved. Between replays torch does not count it as allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> T:
        """Capture what ``work`` launches and return what it returns: tensors that the first replay will fill.

        Raises:
            RuntimeError: if something in it cannot be captured, such as waiting for the device.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # blocks that are kept for others would be of no use to the pool
        before_bytes = torch.cuda.memory_reserved(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream), _told_of_no_capture():
            # Threads that load data may allocate pinned memory meanwhile.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                self._end()
        self.num_bytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return result

    def replay(self) -> None:
        """Launch all of it on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Give the memory back; there must be no replay afterwards."""
        self._graph.reset()
        torch._C._cuda_clearCublasWorkspaces()  # the capture's own is in the pool
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
            generator.graphsafe_set_state(generator.clone_state())  # the old one draws in a capture only, from now on
            raise


def _close(index: int, pool: tuple[int, int]) -> None:
    """Close a pool that a failed capture has left open, and let go of it."""
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:  # it was not open
        return
    torch._C._cuda_releasePool(index, pool)


@contextmanager
def _told_of_no_capture() -> Iterator[None]:
    """Let ``torch.cuda.is_current_stream_capturing`` say no; transformers makes other attention masks where it is."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
