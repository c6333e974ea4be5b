"""What the exchanges of one of several ranks take of its memory, as far as a trace of that rank tells.

    exchange = exchange_of(trace, num_ranks=4, kept=kept_by_exchanges(trace, "cuda"))

The tensors that are exchanged, a gathered block and gradients on their way, are storages of the trace, and counted with
all others. What the library that exchanges them keeps for itself is not: gloo's is measured, NCCL's assumed. Does NOT
cover several machines, whose network cards NCCL keeps buffers for too.
"""

from __future__ import annotations

from plimsoll.records.prediction import Estimate, Exchange
from plimsoll.records.trace import Trace

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
