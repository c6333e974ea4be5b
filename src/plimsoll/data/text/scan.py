"""Scanning of files part by part on all cores, with results in the order of the files.

A part has 2 MiB on any machine, so that the digests of a file do not depend on the number of cores. A task is several
parts, possibly of several small files. From 16 MiB on, forked processes scan, because threads would wait for the GIL.
Only a few tasks are in flight, so the memory needed does not depend on the files. Holes of sparse files are not read:
they are known to be NUL bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from plimsoll.data.formats import Format, Found, Layout, Part, csv, jsonl, packed, tagged, text
from plimsoll.data.formats.helpers.scanning import null_fault, opened
from plimsoll.errors import DataError, PlimsollWarning
from plimsoll.processes.children import forked_pool

PART_BYTES = 2 << 20
_MOST_TASK_BYTES = 4 << 20
_FILES_PER_TASK = 256
_FORK_BYTES = 16 << 20  # from this size on, starting processes (about 20 ms) is worth it
_MOST_PROCESSES = 8  # each takes 6 to 12 MiB; more would wait for the process that writes the index
_MALLOPT_TRIM_THRESHOLD, _MALLOPT_MMAP_MAX = -1, -4  # malloc.h

_MODULES: dict[str, ModuleType] = {"text": text, "jsonl": jsonl, "csv": csv, "packed": packed, "tagged": tagged}

Given = TypeVar("Given")
Result = TypeVar("Result")


def format_named(name: str) -> Format:
    """Return the module of a format."""
    return _MODULES[name]


class Scanned(NamedTuple):
    """A file to scan: its path, its size, the offset at which its first text may begin, and its layout."""

    path: str
    num_bytes: int
    first: int
    layout: Layout


def scan_files(
    files: Iterable[Scanned], max_text_bytes: int, num_bytes: int
) -> Generator[tuple[Part, Found | DataError]]:
    """Yield all parts of all files with the result of scanning them, in order.

    Args:
        files: the files to scan, consumed lazily.
        max_text_bytes: a longer text is a fault.
        num_bytes: the total size of the files in bytes.
    """
    with ExitStack() as stack:
        scanners = _Scanners(stack, num_bytes)
        task_bytes = min(max(num_bytes // (4 * scanners.number), PART_BYTES), _MOST_TASK_BYTES)
        parts = (part for file in files for part in _parts(file, max_text_bytes))
        for task, future in _in_order(scanners.submit, _tasks(parts, task_bytes), scanners.number + 4):
            for part, found in zip(task, scanners.result(task, future), strict=True):
                yield part, found if isinstance(found, DataError) else _unpacked(part, found)


class _Scanners:
    """A pool of scanning processes, or of threads if there is little data or processes cannot run."""

    def __init__(self, stack: ExitStack, num_bytes: int) -> None:
        self.number = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        self._processes: ProcessPoolExecutor | None = None
        if num_bytes >= _FORK_BYTES:  # before the threads: only a process without threads can be forked safely
            self._processes = forked_pool(stack, self.number, _begin_worker)
        self.threads = stack.enter_context(ThreadPoolExecutor(self.number))
        stack.callback(self.threads.shutdown, wait=True, cancel_futures=True)

    def submit(self, parts: list[Part]) -> Future[list[Found | DataError]]:
        """Start scanning some parts."""
        if self._processes is not None:
            try:
                return self._processes.submit(_scan_all, parts)
            except BrokenProcessPool:
                self._go_on_without_processes()
        return self.threads.submit(_scan_all, parts)

    def result(self, parts: list[Part], future: Future[list[Found | DataError]]) -> list[Found | DataError]:
        """Wait for the results of scanning ``parts``, and return them."""
        try:
            return future.result()
        except BrokenProcessPool:
            self._go_on_without_processes()
            return _scan_all(parts)

    def _go_on_without_processes(self) -> None:
        if self._processes is not None:
            self._processes = None
            warnings.warn(
                "a process that scanned the files was killed, perhaps by the kernel because memory ran out: threads "
                "continue the scan, more slowly, and no data is lost",
                PlimsollWarning,
                stacklevel=2,
            )


def _begin_worker() -> None:
    library = ctypes.CDLL(None)
    if hasattr(
        library, "mallopt"
    ):  # of glibc; otherwise each part's arrays are new pages, which costs a fifth of the time
        library.mallopt(_MALLOPT_MMAP_MAX, 0)
        library.mallopt(_MALLOPT_TRIM_THRESHOLD, -1)


def _in_order(
    submit: Callable[[Given], Future[Result]], tasks: Iterable[Given], num_ahead: int
) -> Iterator[tuple[Given, Future[Result]]]:
    waiting: deque[tuple[Given, Future[Result]]] = deque()
    for task in tasks:
        waiting.append((task, submit(task)))
        if len(waiting) >= num_ahead:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _tasks(parts: Iterable[Part], task_bytes: int) -> Iterator[list[Part]]:
    """Yield lists of parts, each of at most about ``task_bytes`` bytes in all."""
    task: list[Part] = []
    num_bytes = 0
    for part in parts:
        if task and (num_bytes + part.end - part.begin > task_bytes or len(task) >= _FILES_PER_TASK):
            yield task
            task, num_bytes = [], 0
        task.append(part)
        num_bytes += part.end - part.begin
    if task:
        yield task


def _parts(file: Scanned, max_text_bytes: int) -> Iterator[Part]:
    size = file.num_bytes
    parts = (
        Part(file.path, begin, min(begin + PART_BYTES, size), size, file.layout, max_text_bytes, file.first)
        for begin in range(0, size, PART_BYTES)
    )
    if file.layout.format != "csv" or not file.layout.quotes or file.num_bytes <= PART_BYTES:
        yield from parts
        return
    quoting = csv.OPENS
    for part in parts:
        yield part._replace(quoting=quoting)
        quoting = csv.quoting_after(part._replace(quoting=quoting))


def _scan_all(parts: list[Part]) -> list[Found | DataError]:
    return [_scan(part) for part in parts]


def _scan(part: Part) -> Found | DataError:
    try:
        is_hole = part.layout.format == "text" and part.end - part.begin == PART_BYTES and _is_hole(part)
        found = _nothing_found(part) if is_hole else format_named(part.layout.format).scan(part)
    except DataError as error:
        return error
    return found._replace(
        starts=(found.starts - part.begin).astype(np.uint32)
    )  # halves the bytes sent between processes


def _unpacked(part: Part, found: Found) -> Found:
    return found._replace(starts=found.starts + np.int64(part.begin))


def _nothing_found(hole: Part) -> Found:
    inks = np.ones(1, np.bool_) if hole.layout.unit == "paragraph" else None
    return Found(np.empty(0, np.int64), _digest_of_nulls(), (null_fault(hole.begin)._replace(line=0),), inks=inks)


@lru_cache(maxsize=1)
def _digest_of_nulls() -> bytes:
    return xxhash.xxh3_128_digest(bytes(PART_BYTES))


def _is_hole(part: Part) -> bool:
    """Return whether no byte of a part was ever written."""
    with opened(part.path) as descriptor:
        try:
            return os.lseek(descriptor, part.begin, os.SEEK_DATA) >= part.end
        except OSError as error:
            return error.errno == errno.ENXIO  # only a hole up to the end of the file
