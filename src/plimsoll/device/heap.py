"""What the C library's heap keeps of freed memory, and how it lets go.

Source: malloc_trim(3), mallinfo(3), mallopt(3) of glibc. With another C library (musl) nothing is known and nothing is
done. Needs no torch.
"""

from __future__ import annotations

import ctypes

_C_LIBRARY = ctypes.CDLL(None)
_MALLOPT_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in glibc's malloc.h


class _Mallinfo2(ctypes.Structure):
    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks; then the free bytes, and keepcost
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


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

    It also ends glibc's own raising of that threshold (to 32 MiB, as such blocks are freed). There is no way back.
    """
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_MALLOPT_MMAP_THRESHOLD, num_bytes)
