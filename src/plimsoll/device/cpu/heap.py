"""Control over freed memory that the C library's heap retains.

Sources: malloc_trim(3), mallinfo(3), mallopt(3) of glibc. With other C libraries (musl), nothing is done. Needs no
torch.
"""

from __future__ import annotations

import ctypes

from plimsoll.records.allocator import DEFAULT_HEAP

# A freed block between two used blocks of the heap still counts as data of the process. A separately mapped block does
# not, but the kernel clears its pages at each allocation. GPT-2 training steps, glibc 2.36, torch 2.13, 2 cores:
#
#     blocks mapped from                        glibc's own      4 MiB      1 MiB    128 KiB ;
#     peak, 4 layers, vocabulary 8000, MiB             1055        977        879        871 ;
#     peak, 6 layers, vocabulary 2000, MiB              589        583        565        511 ;
#     CPU seconds per step of the latter               0.49       0.45       0.63       1.00 ;
#     largest batch that fits after an OOM, with a budget of
#         400 MiB                                         2          2          4          4 ;
#         600 MiB                                         8          8         16         16 ;
#         1000 MiB                                       16         32         32         32 .
#
# A larger micro-batch gains little on a CPU, but the time is lost in every step. In the demo, a step takes 2.05 s with
# 4 MiB and 2.5 s with 128 KiB, at the same micro-batch. So 128 KiB is used only if the smallest micro-batch does not
# fit.
FAST_BYTES = 4 << 20
"""The block size from which blocks are mapped separately in a process with a limit. It costs no time."""

TIGHT_BYTES = 128 << 10
"""The block size from which blocks are mapped separately after a process has reached its limit, as a last resort.

The heap then retains the least memory.
"""

USUAL_BYTES = 32 << 20
"""The block size from which blocks are mapped separately without a limit: the maximum of glibc's dynamic threshold."""

_C_LIBRARY = ctypes.CDLL(None)
_MAPPED_FROM: list[int | None] = [USUAL_BYTES]  # the last value set, because the C library cannot report it
_MALLOPT_TRIM_THRESHOLD, _MALLOPT_MMAP_THRESHOLD, _MALLOPT_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h
_NO_TRIM, _USUAL_NUM_MAPPINGS = -1, 65536  # an M_TRIM_THRESHOLD that is never reached; DEFAULT_MMAP_MAX


class _Mallinfo2(ctypes.Structure):
    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks; then the free bytes, and keepcost
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def is_glibc() -> bool:
    """Return whether the C library is glibc, as far as this module needs it."""
    return hasattr(_C_LIBRARY, "mallopt") and hasattr(_C_LIBRARY, "malloc_trim")


def trim() -> None:
    """Return the heap's free pages to the system."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def free_bytes() -> int:
    """Return the free bytes of the heap, whether their pages are resident or not; 0 if they cannot be read."""
    if not hasattr(_C_LIBRARY, "mallinfo2"):  # glibc before 2.33, musl
        return 0
    _C_LIBRARY.mallinfo2.restype = _Mallinfo2
    return int(_C_LIBRARY.mallinfo2().fordblks)


def map_blocks_from(num_bytes: int) -> None:
    """Map every later allocation of at least ``num_bytes`` separately, so that freeing it returns the memory at once.

    This also disables glibc's dynamic threshold, which cannot be enabled again (see `USUAL_BYTES`).
    """
    _MAPPED_FROM[:] = [num_bytes]
    _set(_MALLOPT_MMAP_THRESHOLD, num_bytes)
    _set(_MALLOPT_TRIM_THRESHOLD, top_bytes(num_bytes))
    _set(_MALLOPT_MMAP_MAX, _USUAL_NUM_MAPPINGS)


def top_bytes(threshold_bytes: int) -> int:
    """Return the most freed bytes that the heap retains at its top.

    Args:
        threshold_bytes: the block size from which blocks are mapped separately.
    """
    if threshold_bytes < USUAL_BYTES:
        return DEFAULT_HEAP.trim_threshold_bytes
    return 2 * threshold_bytes  # glibc raises both thresholds in this ratio


def keep_freed() -> None:
    """Make the heap retain all freed memory until `map_blocks_from` is called.

    Allocations are then faster, because the kernel need not clear pages, but holes remain in the heap.
    """
    _MAPPED_FROM[:] = [None]
    _set(_MALLOPT_MMAP_MAX, 0)
    _set(_MALLOPT_TRIM_THRESHOLD, _NO_TRIM)


def threshold_bytes() -> int | None:
    """Return the block size that `map_blocks_from` last set; ``None`` if the heap retains all freed memory."""
    return _MAPPED_FROM[0]


def _set(parameter: int, value: int) -> None:
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(parameter, value)
