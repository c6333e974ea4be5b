"""Memory of libraries that no trace contains: workspaces of cuBLAS, buffers of gloo and NCCL.

Not covered: matrix products on other streams or in other threads than forward and backward. NCCL's buffers for network
cards in runs on several machines are not covered either.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.memory.annotations import captured_rows
from plimsoll.records.prediction import Estimate, Exchange
from plimsoll.records.trace import Trace

# A linear layer with a bias uses cuBLASLt (`gemm_and_bias`, aten/src/ATen/cuda/CUDABlas.cpp; the size is from
# pytorch#73328). Up to torch 2.6, its workspace is freed after each call. Later versions keep it, for each thread
# (`tests/recordings`).
LT_BYTES = 1 << 20
"""Size in bytes of cuBLASLt's workspace."""

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
    """Yield the allocations and frees of a trace on the device in order, with cuBLAS's workspaces.

    Each item is ``(storage, bytes)``, with negative bytes for a free. Workspaces have new storage ids.

    Args:
        trace: the trace of a training run on CUDA.
        workspace_bytes: workspace of each cuBLAS handle; 0 if workspaces exist already or are outside the allocator.
        lt_bytes: additional cuBLASLt workspace of linear layers with a bias.
        returns_lt: whether the cuBLASLt workspace is freed after each call, as up to torch 2.6.
        num_threads: 2 if backward runs in a separate thread, as on CUDA.
        private: ids of the storages in the pool of a CUDA graph. Ids of workspaces in this pool are added to the set.
    """
    # A thread that multiplies matrices gets a cuBLAS handle. Each handle and stream gets a workspace that is kept until
    # the process ends. Forward allocates one at its first product, and backward another in autograd's thread
    # (`getCurrentCUDABlasHandle`, aten/src/ATen/cuda/CublasHandlePool.cpp). The capture of a CUDA graph uses a separate
    # stream, and so a third workspace, in the graph's pool. The position of a workspace matters more than its size: it
    # splits a free block that an activation would have reused.
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
_BY_NUMBER = 64  # bytes; smaller exchanges are status values, not tensors of the training

# The two threads of gloo have separate heaps, which keep copies of up to 3.9 MiB each. Measured: 7.0 MiB for a GPT-2
# with all-reduced gradients, 5.1 and 6.8 for a sharded one (malloc_info, glibc 2.36, torch 2.13).
_GLOO = Estimate(likely_bytes=6 * _MIB, low_bytes=2 * _MIB, high_bytes=8 * _MIB, modelled_bytes=6 * _MIB)
# NCCL uses 9.2 MiB for each channel and neighbor, and memory for kernels. The three protocols use 4 MiB, 4.7 and 0.5
# (src/init.cc; NCCL_BUFFSIZE changes the first). There are 2 channels over PCIe and up to 32 over NVLink. Not measured.
_NCCL = Estimate(likely_bytes=256 * _MIB, low_bytes=64 * _MIB, high_bytes=512 * _MIB, assumed_bytes=256 * _MIB)


def kept_by_exchanges(trace: Trace, device: str) -> Estimate | None:
    """Return the memory that gloo or NCCL keeps for collectives; ``None`` if the trace has no collectives.

    Args:
        trace: the trace.
        device: ``"cpu"`` or ``"cuda"``.
    """
    if not any(text.startswith((_ADDED_UP, _GATHERED, _SCATTERED)) for text in trace.texts):
        return None
    return _GLOO if device == "cpu" else _NCCL


def exchange_of(trace: Trace, num_ranks: int, kept: Estimate) -> Exchange:
    """Return the bytes exchanged between ranks in the last step of a trace.

    Args:
        trace: the trace of one rank.
        num_ranks: the number of ranks.
        kept: memory of the communication library, see `kept_by_exchanges`.
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
