"""Simulation of glibc's malloc: the memory that stays resident after allocations and frees of CPU tensors.

Source: malloc/malloc.c of glibc 2.36 (``_int_malloc``, ``_int_memalign``, ``_int_free``, ``sysmalloc``, ``systrim``,
``mtrim``), the main arena. For a process without other allocations, the simulation is exact to a few pages. In a
training run, the remaining error depends on small blocks between the tensors. Small blocks of tensors and autograd are
simulated (`plimsoll.memory.allocator.heap_calls`). A simpler simulation in ``tests/plain_heap.py`` agrees after every
event.

Not covered: small blocks of Python; other arenas, that is, allocations of other threads (torch's backward on a CPU runs
in the calling thread); glibc from 2.38 on, whose memalign searches for an aligned block first; transparent huge pages;
other C libraries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.memory.allocator.heap_calls import FREE, MALLOC, MEMALIGN, ROW, TRIM, HeapCalls
from plimsoll.records.allocator import HeapRules

_HEADER_BYTES = 8
_CHUNK_ALIGNMENT_BYTES = 16
_LEAST_CHUNK_BYTES = 32
_CHUNK_STRUCT_BYTES = 48  # malloc_trim keeps the links of a free chunk
_SMALL_BYTES = 1024
_CACHED_BYTES = 1040  # size of the largest chunk in the thread cache
_FAST_BYTES = 128  # size of the largest chunk that is not merged with its neighbors at once
_TRIM_FROM_BYTES = 65536  # FASTBIN_CONSOLIDATION_THRESHOLD: a smaller free block never trims the top
_HIGHEST_THRESHOLD_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX
_MOST_MAPPINGS = 65536  # M_MMAP_MAX
_NOWHERE = -1 << 62  # the start of a block that is a separate memory mapping


@dataclass(frozen=True)
class HeapReplay:
    """The effect of a list of malloc and free calls on a heap.

    Each array has one entry per ``ROW`` in `HeapCalls`.
    """

    resident_bytes: NDArray[np.int64]
    address_bytes: NDArray[np.int64]
    """Bytes that a limit on address space counts: the heap with its holes, resident or not."""
    rules: HeapRules
    map_range: tuple[int, int]
    """The largest request for which the heap grew, and the smallest that was memory-mapped instead."""
    trim_range: tuple[int, int]
    """The largest top of the heap that was kept, and the smallest that was trimmed."""

    def is_as_with(self, rules: HeapRules) -> bool:
        """Return whether a heap with other rules would have behaved the same at every call."""
        if rules == self.rules:
            return True
        thresholds = ("mmap_threshold_bytes", "trim_threshold_bytes")
        alike = self.rules.model_copy(update={name: getattr(rules, name) for name in thresholds})
        return (
            rules == alike
            and not rules.is_dynamic
            and rules.build_threshold_bytes is None
            and self.map_range[0] < rules.mmap_threshold_bytes <= self.map_range[1]
            and self.trim_range[0] < rules.trim_threshold_bytes <= self.trim_range[1]
        )


def replay(calls: HeapCalls, rules: HeapRules, start_bytes: int = 0) -> HeapReplay:
    """Simulate a list of calls on an empty heap. Every block is written to its end.

    Args:
        calls: the calls.
        rules: configuration of the heap.
        start_bytes: address of the first block; only its remainder modulo the alignment matters.
    """
    return _Heap(calls, rules, start_bytes).replay()


class _Heap:
    """The main arena. Blocks are numbered as in the calls; chunks are identified by their start and end addresses."""

    __slots__ = (  # with this number of attributes, lookups without slots are slow
        "_alignment_bytes", "_bytes_of", "_cached", "_calls", "_end", "_end_of", "_fast", "_given_back", "_has_fast",
        "_is_dynamic", "_last_remainder", "_least_mapped_bytes", "_least_trimmed_bytes", "_map_from_bytes",
        "_mapped_bytes", "_mapped_resident_bytes", "_mappings", "_most_cached", "_most_in_heap_bytes",
        "_most_left_bytes", "_page_bytes", "_resident_bytes", "_rest_end", "_rest_start", "_rules", "_sizes", "_sorted",
        "_start", "_start_of", "_starts", "_top", "_top_pad_bytes", "_touched_end", "_trim_from_bytes", "_unsorted",
        "_written_end",
    )  # fmt: skip

    def __init__(self, calls: HeapCalls, rules: HeapRules, start_bytes: int) -> None:
        self._calls, self._rules = calls, rules
        self._map_from_bytes, self._trim_from_bytes = rules.mmap_threshold_bytes, rules.trim_threshold_bytes
        self._is_dynamic, self._most_cached = rules.is_dynamic, rules.num_cached_per_size
        self._page_bytes, self._alignment_bytes = rules.page_bytes, rules.alignment_bytes
        self._top_pad_bytes = rules.top_pad_bytes
        # The chunk start of each block, and its chunk size: the size requested unless a larger chunk is found.
        self._starts = [0] * len(calls.block_bytes)
        self._bytes_of: list[int] = _chunk_bytes(np.asarray(calls.block_bytes)).tolist()
        self._mappings: dict[int, tuple[int, int, int]] = {}  # block -> bytes of the mapping, of the chunk, resident
        # Chunks are plain numbers, which the garbage collector need not traverse: a plan replays a million calls.
        # Starts of small freed chunks that are not merged with others, in lists by size.
        self._cached: list[list[int]] = [[] for _ in range(0, _CACHED_BYTES + 1, _CHUNK_ALIGNMENT_BYTES)]
        self._fast: list[list[int]] = [[] for _ in range(0, _FAST_BYTES + 1, _CHUNK_ALIGNMENT_BYTES)]
        self._has_fast = False
        # All other free chunks, by their ends. Chunks freed since the last search are kept in the order of their frees,
        # older ones in lists by size. When a chunk of a list is merged with another, its end stays in the list and is
        # skipped later.
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._unsorted: dict[int, None] = {}
        self._sorted: dict[int, list[int]] = {}
        self._sizes: list[int] = []  # sorted sizes of the keys of `_sorted`
        self._last_remainder = -1  # start of the remainder of the last split for a small block
        # The last remainder, while it is the only unsorted chunk; it is then in none of the collections above. Most
        # small blocks are cut from it, and filing it each time would be slow.
        self._rest_start = self._rest_end = 0
        self._start = self._top = self._end = start_bytes  # start of the heap, of its top chunk, and end of the heap
        self._mapped_bytes = self._mapped_resident_bytes = 0
        self._touched_end = 0
        self._given_back = _Intervals()
        self._resident_bytes = 0
        self._written_end = 0  # pages below this address are resident
        self._most_in_heap_bytes = self._most_left_bytes = -1
        self._least_mapped_bytes = self._least_trimmed_bytes = 1 << 63

    def replay(self) -> HeapReplay:  # noqa: PLR0912 -- a branch for each kind of call, and fast paths
        """Simulate all calls in order."""
        resident_bytes, address_bytes = [], []
        starts, bytes_of = self._starts, self._bytes_of
        cached_of, most_cached, fast_of = self._cached, self._most_cached, self._fast
        for kind, value in zip(self._calls.kinds, self._calls.values, strict=True):
            if kind == FREE:
                chunk_bytes = bytes_of[value]
                if chunk_bytes <= _CACHED_BYTES and len(cached := cached_of[chunk_bytes >> 4]) < most_cached:
                    cached.append(starts[value])
                elif chunk_bytes <= _FAST_BYTES:
                    fast_of[chunk_bytes >> 4].append(starts[value])
                    self._has_fast = True
                elif starts[value] == _NOWHERE:
                    self._unmap(value)
                elif self._join((starts[value],), chunk_bytes) >= _TRIM_FROM_BYTES:
                    self._trim_top()
            elif kind == MALLOC:
                chunk_bytes = bytes_of[value]
                if cached := cached_of[chunk_bytes >> 4]:
                    start = cached.pop()
                    end = start + chunk_bytes
                else:
                    start, end = self._find_small(chunk_bytes)
                    bytes_of[value] = end - start
                    if start == _NOWHERE:
                        self._map(value, chunk_bytes)
                starts[value] = start
                if end > self._written_end:
                    self._write(start, end)
            elif kind == ROW:
                resident_bytes.append(self._resident_bytes)
                address_bytes.append(self._mapped_bytes + self._end)
            elif kind == MEMALIGN:
                self._memalign(value, bytes_of[value])
            elif kind == TRIM:
                self._trim()
            else:
                self._map_blocks_from(value)
        return HeapReplay(
            np.asarray(resident_bytes, dtype=np.int64),
            np.asarray(address_bytes, dtype=np.int64) - self._start,
            self._rules,
            (self._most_in_heap_bytes, self._least_mapped_bytes),
            (self._most_left_bytes, self._least_trimmed_bytes),
        )

    def _memalign(self, block: int, chunk_bytes: int) -> None:
        """Allocate a larger chunk, cut the aligned block out of it, and free the rest on both sides."""
        # torch aligns blocks to 64 bytes, which adds some 100 bytes. A free chunk therefore fits no new block of the
        # same size unless it was merged with a neighbor. This is one reason for holes in a heap.
        wanted_bytes = chunk_bytes + (self._alignment_bytes + _LEAST_CHUNK_BYTES + _CHUNK_ALIGNMENT_BYTES)
        start, end = self._find(wanted_bytes)
        if start == _NOWHERE:
            self._map(block, wanted_bytes)
        else:
            if lead_bytes := _lead_bytes(start, self._alignment_bytes):
                self._cut_off(start, lead_bytes)
                start += lead_bytes
            rest_bytes = end - start - chunk_bytes
            if rest_bytes > _LEAST_CHUNK_BYTES:
                end -= rest_bytes
                self._cut_off(end, rest_bytes)
            if end > self._written_end:
                self._write(start, end)
        self._starts[block], self._bytes_of[block] = start, end - start

    def _write(self, start: int, end: int) -> None:
        """Make the pages of a chunk resident, because the program writes to them."""
        page_bytes = self._page_bytes
        self._given_back.remove(start // page_bytes * page_bytes, _round_up(end, page_bytes))
        self._touched_end = max(self._touched_end, end)
        self._count()

    def _count(self) -> None:
        """Recompute resident bytes: pages of live mappings, and touched heap pages that were not released."""
        heap_bytes = _round_up(self._touched_end, self._page_bytes) - self._given_back.total_bytes
        self._resident_bytes = self._mapped_resident_bytes + heap_bytes
        self._written_end = 0 if self._given_back.total_bytes else self._touched_end

    def _find_small(self, chunk_bytes: int) -> tuple[int, int]:
        """Take a chunk from the fast list or from the last remainder, or search for one.

        The remaining chunks of the fast list move to the thread cache.
        """
        if chunk_bytes <= _FAST_BYTES and (fast := self._fast[chunk_bytes >> 4]):
            start, cached = fast.pop(), self._cached[chunk_bytes >> 4]
            while fast and len(cached) < self._most_cached:
                cached.append(fast.pop())
            return start, start + chunk_bytes
        start = self._rest_start
        end = start + chunk_bytes
        if end < self._rest_end - _LEAST_CHUNK_BYTES and chunk_bytes < _SMALL_BYTES:
            self._rest_start = end
            return start, end
        return self._find(chunk_bytes)

    def _find(self, wanted_bytes: int) -> tuple[int, int]:
        """Take a chunk and return its start and end. The start is `_NOWHERE` if the block must be mapped."""
        # The order of `_int_malloc`: an exact fit among chunks freed since the last search, the smallest chunk that is
        # large enough, and the top. Then follow a memory mapping (from the threshold on) and a larger heap.
        if self._has_fast and wanted_bytes >= _SMALL_BYTES:
            self._join_fast()
        if self._rest_end:
            self._file_rest()
        end_of, start_of, unsorted, by_size = self._end_of, self._start_of, self._unsorted, self._sorted
        for end in unsorted:
            start = start_of[end]
            chunk_bytes = end - start
            if chunk_bytes == wanted_bytes or (start == self._last_remainder and self._is_cut(wanted_bytes, end)):
                break
            if chunk_bytes in by_size:
                by_size[chunk_bytes].append(end)
            else:
                by_size[chunk_bytes] = [end]
                insort(self._sizes, chunk_bytes)
        else:
            unsorted.clear()
            end = self._best_fit(wanted_bytes)
            if end == _NOWHERE:
                return self._from_top(wanted_bytes)
            start = start_of[end]
        if len(unsorted) > 1:  # `end` is itself in `unsorted`
            self._forget_before(end)
        rest = start + wanted_bytes
        del end_of[start]
        if end - rest < _LEAST_CHUNK_BYTES:
            del start_of[end]
            unsorted.pop(end, None)
            return start, end
        if wanted_bytes < _SMALL_BYTES:
            self._last_remainder = rest
            if not unsorted or (len(unsorted) == 1 and end in unsorted):
                unsorted.clear()
                del start_of[end]
                self._rest_start, self._rest_end = rest, end
                return start, rest
        end_of[rest] = end
        start_of[end] = rest
        unsorted[end] = None
        return start, rest

    def _is_cut(self, wanted_bytes: int, remainder_end: int) -> bool:
        """Return whether a block is cut from the last remainder although another chunk might fit better."""
        is_only_one = remainder_end == next(reversed(self._unsorted))
        is_large_enough = remainder_end - self._last_remainder > wanted_bytes + _LEAST_CHUNK_BYTES
        return wanted_bytes < _SMALL_BYTES and is_only_one and is_large_enough

    def _file_rest(self) -> None:
        """Move the last remainder to the unsorted chunks, before another chunk is added or a search begins."""
        start, end = self._rest_start, self._rest_end
        self._end_of[start] = end
        self._start_of[end] = self._last_remainder = start
        self._unsorted[end] = None
        self._rest_start = self._rest_end = 0

    def _forget_before(self, end: int) -> None:
        """Remove the chunks before ``end`` from the unsorted chunks: a search that ended early has sorted them."""
        for before in list(self._unsorted):
            if before == end:
                return
            del self._unsorted[before]

    def _from_top(self, wanted_bytes: int) -> tuple[int, int]:
        start = self._top
        if self._end - start < wanted_bytes + _LEAST_CHUNK_BYTES:
            if self._has_fast:
                self._join_fast()
                return self._find(wanted_bytes)
            if self._is_mapped(wanted_bytes):
                return _NOWHERE, 0
            needed_bytes = wanted_bytes + self._top_pad_bytes + _LEAST_CHUNK_BYTES - (self._end - start)
            self._end += _round_up(needed_bytes, self._page_bytes)
        self._top = start + wanted_bytes
        return start, self._top

    def _best_fit(self, wanted_bytes: int) -> int:
        """Remove the smallest sorted chunk that is large enough from its list and return its end."""
        sizes, by_size, start_of = self._sizes, self._sorted, self._start_of
        place = bisect_left(sizes, wanted_bytes)
        while place < len(sizes):
            chunk_bytes = sizes[place]
            ends = by_size[chunk_bytes]
            while ends:
                end = ends.pop()
                if start_of.get(end) == end - chunk_bytes:
                    return end
            del by_size[chunk_bytes], sizes[place]
        return _NOWHERE

    def _is_mapped(self, wanted_bytes: int) -> bool:
        if len(self._mappings) >= _MOST_MAPPINGS:
            return False
        if wanted_bytes < self._map_from_bytes:
            self._most_in_heap_bytes = max(self._most_in_heap_bytes, wanted_bytes)
            return False
        self._least_mapped_bytes = min(self._least_mapped_bytes, wanted_bytes)
        return True

    def _map(self, block: int, wanted_bytes: int) -> None:
        page_bytes, lead_bytes = self._page_bytes, _lead_bytes(0, self._alignment_bytes)
        num_bytes = self._calls.block_bytes[block]
        mapped_bytes = _round_up(wanted_bytes + _HEADER_BYTES, page_bytes)
        resident_bytes = _round_up(lead_bytes + _CHUNK_ALIGNMENT_BYTES + num_bytes, page_bytes)
        self._mappings[block] = mapped_bytes, mapped_bytes - lead_bytes, resident_bytes
        self._mapped_bytes += mapped_bytes
        self._mapped_resident_bytes += resident_bytes
        self._resident_bytes += resident_bytes

    def _unmap(self, block: int) -> None:
        mapped_bytes, chunk_bytes, resident_bytes = self._mappings.pop(block)
        self._mapped_bytes -= mapped_bytes
        self._mapped_resident_bytes -= resident_bytes
        self._resident_bytes -= resident_bytes
        if self._is_dynamic and self._map_from_bytes < chunk_bytes <= _HIGHEST_THRESHOLD_BYTES:
            self._map_from_bytes = chunk_bytes
            self._trim_from_bytes = 2 * chunk_bytes

    def _map_blocks_from(self, num_bytes: int) -> None:
        """Set the mapping threshold and stop its automatic increase, as ``mallopt(M_MMAP_THRESHOLD)``.

        Free chunks and the trim threshold do not change: if the mapping threshold is set late, free heap blocks are
        still used.
        """
        self._join_fast()
        self._map_from_bytes, self._is_dynamic = num_bytes, False

    def _cut_off(self, start: int, chunk_bytes: int) -> None:
        """Free the part of a chunk that an aligned block does not use."""
        if chunk_bytes <= _CACHED_BYTES and len(self._cached[chunk_bytes >> 4]) < self._most_cached:
            self._cached[chunk_bytes >> 4].append(start)
        elif chunk_bytes <= _FAST_BYTES:
            self._fast[chunk_bytes >> 4].append(start)
            self._has_fast = True
        elif self._join((start,), chunk_bytes) >= _TRIM_FROM_BYTES:
            self._trim_top()

    def _join(self, starts: Iterable[int], chunk_bytes: int) -> int:
        """Merge chunks of one size with free neighbors, and return the bytes of the last merged chunk."""
        if self._rest_end:
            self._file_rest()
        end_of, start_of, unsorted = self._end_of, self._start_of, self._unsorted
        for first in starts:
            start, end = first, first + chunk_bytes
            if start in start_of:
                if start in unsorted:
                    del unsorted[start]
                start = start_of.pop(start)
            if end in end_of:
                end = end_of.pop(end)
                if end in unsorted:
                    del unsorted[end]
            elif end == self._top:
                end_of.pop(start, None)
                self._top = start
                continue
            end_of[start] = end
            start_of[end] = start
            unsorted[end] = None
        return (self._end if start == self._top else end) - start

    def _join_fast(self) -> None:
        """Merge the small chunks that were freed since the last call."""
        if not self._has_fast:
            return
        chunk_bytes = 0
        for starts in self._fast:
            if starts:
                starts.reverse()
                self._join(starts, chunk_bytes)
                starts.clear()
            chunk_bytes += _CHUNK_ALIGNMENT_BYTES
        self._has_fast = False

    def _trim_top(self) -> None:
        """Merge fast chunks, and trim the top of the heap if it exceeds the threshold."""
        self._join_fast()
        top_bytes = self._end - self._top
        if top_bytes < self._trim_from_bytes:
            self._most_left_bytes = max(self._most_left_bytes, top_bytes)
        else:
            self._least_trimmed_bytes = min(self._least_trimmed_bytes, top_bytes)
            self._shrink(self._top_pad_bytes)

    def _trim(self) -> None:
        """Release all whole free pages inside the heap and at its top, as ``malloc_trim(0)``."""
        self._join_fast()
        if self._rest_end:
            self._file_rest()
        page_bytes = self._page_bytes
        for start, end in self._end_of.items():
            first, last = _round_up(start + _CHUNK_STRUCT_BYTES, page_bytes), end // page_bytes * page_bytes
            if last > first:
                self._given_back.add(first, last)
        self._shrink(pad_bytes=0)
        self._count()

    def _shrink(self, pad_bytes: int) -> None:
        free_bytes = self._end - self._top - _LEAST_CHUNK_BYTES - 1 - pad_bytes
        if free_bytes >= self._page_bytes:
            self._end -= free_bytes // self._page_bytes * self._page_bytes
            self._touched_end = min(self._touched_end, self._end)
            self._given_back.remove(_round_up(self._touched_end, self._page_bytes), None)
            self._count()


class _Intervals:
    """A set of addresses, stored as intervals that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total_bytes = 0

    def add(self, start: int, end: int) -> None:
        self.remove(start, end)
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self.total_bytes += end - start

    def remove(self, start: int, end: int | None) -> None:
        """Remove a range; with ``end=None``, everything from ``start`` on."""
        if not self._starts:
            return
        end = self._ends[-1] if end is None else end
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        cut = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        kept = [(a, min(b, start)) for a, b in cut if a < start] + [(max(a, end), b) for a, b in cut if b > end]
        self.total_bytes -= sum(b - a for a, b in cut) - sum(b - a for a, b in kept)
        self._starts[first:last] = [a for a, _ in kept]
        self._ends[first:last] = [b for _, b in kept]


def _chunk_bytes(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the chunk size in bytes of each block, from its requested bytes."""
    padded_bytes = -(-(num_bytes + _HEADER_BYTES) // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES
    return np.maximum(padded_bytes, _LEAST_CHUNK_BYTES)


def _lead_bytes(start: int, alignment_bytes: int) -> int:
    """Return the size in bytes of the chunk that is cut off before the aligned chunk."""
    lead_bytes = -(start + _CHUNK_ALIGNMENT_BYTES) % alignment_bytes
    return lead_bytes + alignment_bytes if 0 < lead_bytes < _LEAST_CHUNK_BYTES else lead_bytes


def _round_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes
