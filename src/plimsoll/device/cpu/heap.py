"""What the C library's heap keeps of freed memory, and how it lets go.

Source: malloc_trim(3), mallinfo(3), mallopt(3) of glibc. With another C library (musl) nothing is known and nothing is
done. Needs no torch.
"""

from __future__ import annotations

import ctypes

from plimsoll.records.allocator import DEFAULT_HEAP

# A block of the heap that is freed between two that are not keeps counting as the process's data. A block that is a
# mapping of its own does not, but its pages are cleared anew each time. GPT-2 training steps, glibc 2.36, torch 2.13,
# 2 cores:
#
#     blocks mapped from                        glibc's own      4 MiB      1 MiB    128 KiB
#     peak, 4 layers, vocabulary 8000, MiB             1055        977        879        871
#     peak, 6 layers, vocabulary 2000, MiB              589        583        565        511
#     CPU seconds per step of the latter               0.49       0.45       0.63       1.00
#     largest batch that fits after an OOM:
#         budget 400 / 600 / 1000 MiB            2 / 8 / 16 2 / 8 / 32 4 / 16 / 32 4 / 16 / 32
#
# A larger micro-batch is worth little on a CPU and the time is lost in every step (the demo: 2.05 s a step with 4 MiB,
# 2.5 s with 128 KiB, at the same micro-batch), so 128 KiB is for when the smallest micro-batch does not fit either.
FAST_BYTES = 4 << 20
"""The threshold that costs no time: for a process with a limit."""

TIGHT_BYTES = 128 << 10
"""The threshold that keeps the least: the last resort of a process that has reached its limit."""

USUAL_BYTES = 32 << 20
"""Where glibc's own threshold ends once blocks of this size have been freed: for a process without a limit."""

_C_LIBRARY = ctypes.CDLL(None)
_MAPPED_FROM: list[int | None] = [USUAL_BYTES]  # as it was set last: the C library does not tell
_MALLOPT_TRIM_THRESHOLD, _MALLOPT_MMAP_THRESHOLD, _MALLOPT_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
_NO_TRIM, _USUAL_NUM_MAPPINGS = -1, 65536  # M_TRIM_THRESHOLD that is never reached; DEFAULT_MMAP_MAX


class _Mallinfo2(ctypes.Structure):
    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks; then the free bytes, and keepcost
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def is_glibc() -> bool:
    """Whether the C library's heap is the one that is known here."""
    return hasattr(_C_LIBRARY, "mallopt") and hasattr(_C_LIBRARY, "malloc_trim")


def trim() -> None:
    """Give the heap's free pages back to the system."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def free_bytes() -> int:
    """Return how many bytes of the heap are free, whether their pages are resident or not."""
    if not hasattr(_C_LIBRARY, "mallinfo2"):  # glibc before 2.33, musl
        return 0
    _C_LIBRARY.mallinfo2.restype = _Mallinfo2
    return int(_C_LIBRARY.mallinfo2().fordblks)


def map_blocks_from(num_bytes: int) -> None:
    """Make every later allocation of ``num_bytes`` or more a mapping of its own, which goes back when it is freed.

    It also ends glibc's own raising of that threshold, for which there is no way back: see `USUAL_BYTES`.
    """
    _MAPPED_FROM[:] = [num_bytes]
    _set(_MALLOPT_MMAP_THRESHOLD, num_bytes)
    _set(_MALLOPT_TRIM_THRESHOLD, top_bytes(num_bytes))
    _set(_MALLOPT_MMAP_MAX, _USUAL_NUM_MAPPINGS)


def top_bytes(threshold_bytes: int) -> int:
    """Return what the top of the heap keeps of freed memory where blocks are mapped from a size on."""
    if threshold_bytes < USUAL_BYTES:
        return DEFAULT_HEAP.trim_threshold_bytes
    return 2 * threshold_bytes  # as glibc raises both


def keep_freed() -> None:
    """Let the heap keep all that is freed, until `map_blocks_from`: nothing is cleared anew, and holes stay."""
    _MAPPED_FROM[:] = [None]
    _set(_MALLOPT_MMAP_MAX, 0)
    _set(_MALLOPT_TRIM_THRESHOLD, _NO_TRIM)


def threshold_bytes() -> int | None:
    """Return the size from which blocks are mapped as it was set last, ``None`` where freed blocks are kept."""
    return _MAPPED_FROM[0]


def _set(parameter: int, value: int) -> None:
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(parameter, value)
