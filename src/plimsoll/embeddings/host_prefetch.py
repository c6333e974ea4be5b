"""Rows of a mapped table read from the disk before they are looked up, so that a lookup does not wait for each page.

Nothing is kept but the kernel's pages, which every update writes to as well: there is no copy that could be stale.

Does NOT cover systems without ``madvise`` (the rows are still read, page after page).
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_C_LIBRARY = ctypes.CDLL(None)
_PAGE_BYTES = mmap.PAGESIZE


def prefetched(loader: Iterable[Any], read: Callable[[Any], None], ahead: int) -> Iterator[Any]:
    """Yield the batches of ``loader``; a thread calls ``read`` on each, up to ``ahead`` batches before it is yielded.

    An error of ``read`` is raised where its batch would be yielded. The thread ends with the iterator.
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


def read_rows(weight_ND: Tensor, ids: Tensor) -> None:
    """Read every page of the rows of ids, in any order and repeated: all are asked for before any is awaited.

    Raises:
        IndexError: if an id is not a row.
    """
    ids_U = torch.unique(ids)
    _ask_for(weight_ND, ids_U)
    per_page = max(_PAGE_BYTES // weight_ND.element_size(), 1)
    width = weight_ND.shape[1]
    for column in {*range(0, width, per_page), width - 1}:
        weight_ND[:, column].index_select(0, ids_U)


def _ask_for(weight_ND: Tensor, ids_U: Tensor) -> None:
    """Have the kernel begin to read the pages of these rows, in order; see madvise(2)."""
    if not hasattr(_C_LIBRARY, "madvise") or not weight_ND.is_contiguous():
        return
    row_bytes = weight_ND.shape[1] * weight_ND.element_size()
    begin_U = weight_ND.data_ptr() + ids_U * row_bytes
    first_U, last_U = begin_U // _PAGE_BYTES, (begin_U + row_bytes - 1) // _PAGE_BYTES
    is_new_U = torch.ones_like(first_U, dtype=torch.bool)
    is_new_U[1:] = first_U[1:] > last_U[:-1] + 1
    starts = first_U[is_new_U].tolist()
    ends = last_U[is_new_U.roll(-1)].tolist()  # of the row before each new one; the last row's comes last
    for start, end in zip(starts, ends, strict=True):
        length_bytes = (end + 1 - start) * _PAGE_BYTES
        _C_LIBRARY.madvise(ctypes.c_void_p(start * _PAGE_BYTES), ctypes.c_size_t(length_bytes), mmap.MADV_WILLNEED)
