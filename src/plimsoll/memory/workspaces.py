"""What cuBLAS takes from torch's allocator: buffers that no op returns, so that no trace has them.

A thread that multiplies matrices gets a cuBLAS handle, and each handle (and stream) gets a workspace that is kept
until the process ends: one for the forward pass at its first product, one for backward, which runs in autograd's own
thread (``getCurrentCUDABlasHandle``, aten/src/ATen/cuda/CublasHandlePool.cpp). Where it lands matters more than its
size: it splits a free block that an activation would have reused.

The capture of a CUDA graph has a stream of its own, and so another one, in the graph's pool.

A linear layer with a bias goes through cuBLASLt, which takes 1 MiB of its own (``gemm_and_bias``, aten/src/ATen/cuda/
CUDABlas.cpp; the size is from pytorch#73328). Up to torch 2.6 it gives that back each time; later it keeps it, for each
thread (``tests/recordings``, torch 2.11).

Not covered: other streams, and products in other threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.captures import captured_rows
from plimsoll.records.trace import Trace

LT_BYTES = 1 << 20
"""cuBLASLt's own workspace."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addmv.", "aten.mv.", "aten.dot.")
_WITH_BIAS = "aten.addmm."


def deltas_with_workspaces(
    trace: Trace,
    workspace_bytes: int,
    *,
    lt_bytes: int = LT_BYTES,
    returns_lt: bool = False,
    num_threads: int = 2,
    private: set[int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield ``(storage, bytes)`` of the device in order, with cuBLAS's buffers as storages of their own.

    Args:
        trace: a training on CUDA.
        workspace_bytes: of each handle; 0 where they are there already or live outside the allocator.
        lt_bytes: what a linear layer with a bias takes beside it.
        returns_lt: whether it gives that back, as up to torch 2.6.
        num_threads: 2 where backward has a thread of its own, as on CUDA.
        private: the storages of a graph's pool; those that are yielded of it are added.
    """
    names = [trace.texts[name] for name in trace.ops.name]
    new_storage = len(trace.storages.num_bytes)
    have_workspace: set[str] = set()
    have_lt: set[str] = set()
    is_captured = captured_rows(trace)
    served = -1
    for event, storage, num_bytes in trace.deltas():
        yield storage, num_bytes
        op = trace.event_op[event]
        if num_bytes < 0 or op == served or not names[op].startswith(_PRODUCTS):
            continue
        served = op  # torch allocates the result first
        thread = "backward" if num_threads > 1 and trace.ops.phase[op] == "backward" else "forward"
        if is_captured[op]:
            thread = "capture"
        if workspace_bytes and thread not in have_workspace:
            have_workspace.add(thread)
            if is_captured[op] and private is not None:
                private.add(new_storage)
            yield new_storage, workspace_bytes
            new_storage += 1
        if lt_bytes and names[op].startswith(_WITH_BIAS) and thread not in have_lt:
            if is_captured[op] and private is not None:
                private.add(new_storage)
            yield new_storage, lt_bytes
            if returns_lt:
                yield new_storage, -lt_bytes
            else:
                have_lt.add(thread)
            new_storage += 1
