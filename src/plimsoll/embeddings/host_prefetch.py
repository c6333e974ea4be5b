"""Prefetching of rows of a mapped table from the disk, so that a lookup does not wait for each page.

Rows are only read into the page cache. Updates write to the same pages, so there are no stale copies.

It uses process_madvise(2), which takes about a thousand address ranges per call. For 4,096 rows that are already in
memory, this takes 2 ms; one madvise(2) per row took 9 ms. If the kernel refuses the call (Linux before 5.10, some
sandboxes), the rows are read page by page. Supports Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_C_LIBRARY = ctypes.CDLL(None)
_PROCESS_MADVISE = 440  # the same number on every architecture
_MOST_RANGES = 1024  # UIO_MAXIOV
_PAGE_BYTES = mmap.PAGESIZE


def prefetched(loader: Iterable[Any], read: Callable[[Any], None], ahead: int) -> Iterator[Any]:
    """Yield the batches of ``loader``. A thread calls ``read`` with each batch, up to ``ahead`` batches in advance.

    If ``read`` fails for a batch, its error is raised when that batch would be yielded. The thread ends with the
    iterator.
    """
    waiting: deque[tuple[Any, Future[None]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="plimsoll-rows")
    try:
        for batch in loader:
            waiting.append((batch, pool.submit(read, batch)))
            if len(waiting) > ahead:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _next(waiting: deque[tuple[Any, Future[None]]]) -> Any:
    batch, reading = waiting.popleft()
    reading.result()
    return batch


def read_rows(tables: Iterable[Tensor], ids: Tensor) -> None:
    """Read the rows of ids in every table into the page cache. All pages are requested before any is awaited.

    The ids may be in any order, and repeated.

    Raises:
        IndexError: if an id is not a row of the tables.
    """
    ids_U = torch.unique(ids)
    contiguous = [table_ND for table_ND in tables if table_ND.is_contiguous()]
    for table_ND in contiguous:
        _ask_for(table_ND, ids_U)
    for table_ND in contiguous:
        width = table_ND.shape[1]
        for column in {*range(0, width, _PAGE_BYTES // table_ND.element_size()), width - 1}:
            table_ND[:, column].index_select(0, ids_U)


def _ask_for(weight_ND: Tensor, ids_U: Tensor) -> None:
    """Ask the kernel to start reading the pages of the rows ``ids_U``, which are distinct and in ascending order."""
    row_bytes = weight_ND.shape[1] * weight_ND.element_size()
    begin_U = weight_ND.data_ptr() + ids_U * row_bytes
    first_U, end_U = begin_U // _PAGE_BYTES, (begin_U + row_bytes - 1) // _PAGE_BYTES + 1
    # An array of `struct iovec`: address and length in bytes.
    ranges_U2 = torch.stack([first_U, end_U - first_U], 1) * _PAGE_BYTES
    for begin in range(0, len(ranges_U2), _MOST_RANGES):
        part_U2 = ranges_U2[begin : begin + _MOST_RANGES]
        _advise(part_U2.data_ptr(), len(part_U2))


def _advise(address: int, num_ranges: int) -> None:
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:  # some sandboxes refuse it
        return
    try:
        place, number, advice = ctypes.c_void_p(address), ctypes.c_size_t(num_ranges), ctypes.c_int(mmap.MADV_WILLNEED)
        _C_LIBRARY.syscall(
            ctypes.c_long(_PROCESS_MADVISE), ctypes.c_int(process), place, number, advice, ctypes.c_uint(0)
        )
    finally:
        os.close(process)
