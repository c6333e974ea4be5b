"""What libraries keep for themselves, which no trace has: cuBLAS's workspaces, gloo's and NCCL's buffers.

Not covered: products on other streams and in other threads than forward's and backward's; several machines, whose
network cards NCCL keeps buffers for too.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.annotations import captured_rows
from plimsoll.records.prediction import Estimate, Exchange
from plimsoll.records.trace import Trace

# A linear layer with a bias goes through cuBLASLt (`gemm_and_bias`, aten/src/ATen/cuda/CUDABlas.cpp; the size is from
# pytorch#73328). Up to torch 2.6 it gives that back each time; later it keeps it, for each thread (`tests/recordings`).
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
    # A thread that multiplies matrices gets a cuBLAS handle, and each handle (and stream) gets a workspace that is kept
    # until the process ends: one for the forward pass at its first product, one for backward, which runs in autograd's
    # own thread (`getCurrentCUDABlasHandle`, aten/src/ATen/cuda/CublasHandlePool.cpp). The capture of a CUDA graph has
    # a stream of its own, and so another one, in the graph's pool. Where a workspace lands matters more than its size:
    # it splits a free block that an activation would have reused.
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


_MIB = 1 << 20
_ADDED_UP, _GATHERED, _SCATTERED = "c10d.allreduce_.", "c10d._allgather_base_.", "c10d._reduce_scatter_base_."
_BY_NUMBER = 64  # bytes; what is smaller says how it went, and is no tensor of the training

# The two threads in which gloo exchanges have heaps of their own, which keep what they copied of up to 3.9 MiB each:
# 7.0 MiB of a GPT-2 whose gradients are added up, 5.1 and 6.8 of a sharded one (malloc_info, glibc 2.36, torch 2.13).
_GLOO = Estimate(likely_bytes=6 * _MIB, low_bytes=2 * _MIB, high_bytes=8 * _MIB, modelled_bytes=6 * _MIB)
# NCCL takes 9.2 MiB for each channel and neighbour (src/init.cc: 4 MiB, 4.7 and 0.5 for its three protocols;
# NCCL_BUFFSIZE changes the first), of 2 channels over PCIe and up to 32 over NVLink, and kernels. Not measured.
_NCCL = Estimate(likely_bytes=256 * _MIB, low_bytes=64 * _MIB, high_bytes=512 * _MIB, assumed_bytes=256 * _MIB)


def kept_by_exchanges(trace: Trace, device: str) -> Estimate | None:
    """Return what the library that exchanges tensors keeps; ``None`` where none are exchanged.

    Args:
        trace: the trace.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if not any(text.startswith((_ADDED_UP, _GATHERED, _SCATTERED)) for text in trace.texts):
        return None
    return _GLOO if device == "cpu" else _NCCL


def exchange_of(trace: Trace, num_ranks: int, kept: Estimate) -> Exchange:
    """Add up what the last step of a trace exchanges.

    Args:
        trace: of one of the ranks.
        num_ranks: how many there are.
        kept: see `kept_by_exchanges`.
    """
    ops, last = trace.ops, max(trace.ops.step, default=0)
    found: dict[str, list[int]] = {_ADDED_UP: [], _GATHERED: [], _SCATTERED: []}
    for name, step, num_bytes in zip(ops.name, ops.step, ops.moved_bytes, strict=True):
        text = trace.texts[name]
        if step == last and num_bytes > _BY_NUMBER and text.startswith("c10d."):
            for beginning, sizes in found.items():
                if text.startswith(beginning):
                    sizes.append(num_bytes)
    return Exchange(
        num_ranks=num_ranks,
        added_up_bytes=sum(found[_ADDED_UP]),
        gathered_bytes=sum(found[_GATHERED]),
        scattered_bytes=sum(found[_SCATTERED]),
        largest_added_up_bytes=max(found[_ADDED_UP], default=0),
        largest_gathered_bytes=max(found[_GATHERED], default=0),
        largest_scattered_bytes=max(found[_SCATTERED], default=0),
        kept=kept,
    )
