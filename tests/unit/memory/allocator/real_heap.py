"""A process that lets the real malloc do a sequence of events, and says what was resident after each.

    python real_heap.py EVENTS_JSON [OPTION VALUE]...

Events are ``[id, bytes]``: positive to allocate (and write), negative to free, 0 for ``malloc_trim(0)``. The options are
those of ``mallopt``. First everything that is free in the heap is taken, so that the sequence finds nothing but the
top, as `GlibcHeap` assumes; the program prints one JSON object.
"""

import ctypes
import json
import os
import sys

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
LIBC.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class Mallinfo2(ctypes.Structure):
    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


LIBC.mallinfo2.restype = Mallinfo2


def free_below_top_bytes() -> int:
    info = LIBC.mallinfo2()
    return info.fordblks - info.keepcost


def take_all_that_is_free() -> int:
    """Empty the thread's cache, then the bins from the largest size on; return where the next block begins."""
    for num_bytes in range(24, 1033, 16):
        for _ in range(7):
            LIBC.malloc(num_bytes)
    for shift in range(26, 10, -1):
        take_while_it_helps(1 << shift)
    for num_bytes in range(1032, 23, -16):
        take_while_it_helps(num_bytes)
    return LIBC.malloc(24) + 32 - 16


def take_while_it_helps(num_bytes: int) -> None:
    free_bytes = free_below_top_bytes()
    while free_bytes >= num_bytes:
        pointer = LIBC.malloc(num_bytes)
        left_bytes = free_below_top_bytes()
        if left_bytes >= free_bytes:
            if num_bytes > 1032:
                LIBC.free(pointer)
            return
        free_bytes = left_bytes


def main() -> None:
    with open(sys.argv[1]) as file:
        events = json.load(file)
    options = [int(word) for word in sys.argv[2:]]
    blocks = [0] * (1 + max(index for index, _ in events))
    resident = [0] * len(events)
    where = ctypes.c_void_p()
    reference = ctypes.byref(where)
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    for option, value in zip(options[::2], options[1::2], strict=True):
        LIBC.mallopt(option, value)
    LIBC.posix_memalign(reference, 64, 64)  # every function once, so that Python has what it needs for it
    LIBC.free(LIBC.memset(where, 1, 64) and where.value)
    LIBC.malloc_trim(0)
    start = take_all_that_is_free()
    _, pages, shared, *_ = os.pread(descriptor, 256, 0).split()
    base = int(pages) - int(shared)
    for step, (index, num_bytes) in enumerate(events):
        if num_bytes > 0:
            assert LIBC.posix_memalign(reference, 64, num_bytes) == 0
            LIBC.memset(where, 1, num_bytes)
            blocks[index] = where.value
        elif num_bytes < 0:
            LIBC.free(blocks[index])
        else:
            LIBC.malloc_trim(0)
        _, pages, shared, *_ = os.pread(descriptor, 256, 0).split()
        resident[step] = (int(pages) - int(shared) - base) * 4096
    print(json.dumps({"start": start, "free": free_below_top_bytes(), "resident": resident}))


if __name__ == "__main__":
    main()
