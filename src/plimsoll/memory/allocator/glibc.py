"""glibc's malloc, simulated: what a sequence of allocations and frees of CPU tensors leaves resident.

Source: malloc/malloc.c of glibc 2.36 (``_int_malloc``, ``_int_memalign``, ``_int_free``, ``sysmalloc``, ``systrim``,
``mtrim``), the main arena. For a process that does nothing else the simulation is exact to a few pages. In a training
small blocks between the tensors decide about the rest; those of tensors and of autograd are simulated
(`plimsoll.memory.allocator.heap_calls`). A plainer simulation in ``tests/plain_heap.py`` agrees after every event.

Not covered: small blocks of Python; other arenas, so what another thread allocates (torch's backward on a CPU runs in
the calling thread); glibc from 2.38 on, whose memalign searches for an aligned block first; transparent huge pages;
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
_CHUNK_STRUCT_BYTES = 48  # malloc_trim leaves the links of a free chunk in place
_SMALL_BYTES = 1024
_CACHED_BYTES = 1040  # of the largest chunk that the thread's cache keeps
_FAST_BYTES = 128  # of the largest chunk that is not joined with its neighbours at once
_TRIM_FROM_BYTES = 65536  # FASTBIN_CONSOLIDATION_THRESHOLD: a smaller free block never trims the top
_HIGHEST_THRESHOLD_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX
_MOST_MAPPINGS = 65536  # M_MMAP_MAX
_NOWHERE = -1 << 62  # where a block starts that is a mapping of its own


@dataclass(frozen=True)
class HeapReplay:
    """What a list of calls did to a heap; the columns have an entry for each ``ROW`` of the calls."""

    resident_bytes: NDArray[np.int64]
    address_bytes: NDArray[np.int64]
    """What a limit on address space counts: the heap with its holes, whether their pages are there or not."""
    rules: HeapRules
    map_range: tuple[int, int]
    """The most bytes for which the heap was made larger, and the least that were mapped instead."""
    trim_range: tuple[int, int]
    """The most bytes at which the top of the heap was left as it was, and the least at which it went back."""

    def is_as_with(self, rules: HeapRules) -> bool:
        """Whether a heap of other rules would have done the same at every call."""
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
    """Let the heap of a process in which nothing is free do what is asked; every block is written to its end.

    Args:
        calls: what is asked of it.
        rules: how it is set up.
        start_bytes: where the first block begins, of which only the remainder by the alignment has an effect.
    """
    return _Heap(calls, rules, start_bytes).replay()


class _Heap:
    """The main arena. Blocks have the numbers that the calls give them; chunks are known by their starts and ends."""

    __slots__ = (  # as there are too many attributes for Python to find them fast without
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
        # Of each block where its chunk starts, and its bytes: those it will have unless a larger one is found.
        self._starts = [0] * len(calls.block_bytes)
        self._bytes_of: list[int] = _chunk_bytes(np.asarray(calls.block_bytes)).tolist()
        self._mappings: dict[int, tuple[int, int, int]] = {}  # by block: bytes mapped, of the chunk, and resident
        # Chunks are numbers, which the garbage collector need not traverse: a plan replays a million calls.
        # Starts of small chunks that were freed and are not joined with others, in lists by size.
        self._cached: list[list[int]] = [[] for _ in range(0, _CACHED_BYTES + 1, _CHUNK_ALIGNMENT_BYTES)]
        self._fast: list[list[int]] = [[] for _ in range(0, _FAST_BYTES + 1, _CHUNK_ALIGNMENT_BYTES)]
        self._has_fast = False
        # All other free chunks. By their ends: those freed since the last search in that order, the others in lists by
        # size. There an end stays when its chunk is joined with another, and is passed over later.
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._unsorted: dict[int, None] = {}
        self._sorted: dict[int, list[int]] = {}
        self._sizes: list[int] = []  # in order, of those that were sorted
        self._last_remainder = -1  # where the one starts that was left when a small block was cut off last
        # The last remainder, while nothing else is unsorted; then it is in none of these. Most small blocks are cut off
        # it, and to file it each time would take long.
        self._rest_start = self._rest_end = 0
        self._start = self._top = self._end = start_bytes  # of the heap, its top chunk, and what the system gave
        self._mapped_bytes = self._mapped_resident_bytes = 0
        self._touched_end = 0
        self._given_back = _Intervals()
        self._resident_bytes = 0
        self._written_end = 0  # what is written up to here is there already
        self._most_in_heap_bytes = self._most_left_bytes = -1
        self._least_mapped_bytes = self._least_trimmed_bytes = 1 << 63

    def replay(self) -> HeapReplay:  # noqa: PLR0912 -- a branch for each kind of call and what most of them need
        """Do all calls in order."""
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
        """Find more than is asked for, cut the aligned chunk out of that, and free what is left on both sides."""
        # Some 100 bytes more, as torch asks for blocks aligned to 64: a free chunk fits no new block of its own size
        # unless it was joined with a neighbour, which is one reason for the holes of a heap.
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
        """Have the pages of a chunk there."""
        page_bytes = self._page_bytes
        self._given_back.remove(start // page_bytes * page_bytes, _round_up(end, page_bytes))
        self._touched_end = max(self._touched_end, end)
        self._count()

    def _count(self) -> None:
        """Add up what is resident: pages of live mappings, and of the heap all that was touched and not given back."""
        heap_bytes = _round_up(self._touched_end, self._page_bytes) - self._given_back.total_bytes
        self._resident_bytes = self._mapped_resident_bytes + heap_bytes
        self._written_end = 0 if self._given_back.total_bytes else self._touched_end

    def _find_small(self, chunk_bytes: int) -> tuple[int, int]:
        """Take a chunk of the fast list, whose others go to the cache, or of the last remainder, or find one."""
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
        """Take a chunk of the heap and return its start and end; it starts nowhere if the block becomes a mapping."""
        # The order of `_int_malloc`: a chunk of just that size among those freed since the last search, the smallest
        # that is large enough, the top, a mapping of its own (from the threshold on), a larger heap.
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
        if len(unsorted) > 1:  # and this is one of them
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
        """Whether a block is cut off the last remainder though others would fit better."""
        is_only_one = remainder_end == next(reversed(self._unsorted))
        is_large_enough = remainder_end - self._last_remainder > wanted_bytes + _LEAST_CHUNK_BYTES
        return wanted_bytes < _SMALL_BYTES and is_only_one and is_large_enough

    def _file_rest(self) -> None:
        """Put the last remainder where it belongs, as something else is going to be unsorted or searched for."""
        start, end = self._rest_start, self._rest_end
        self._end_of[start] = end
        self._start_of[end] = self._last_remainder = start
        self._unsorted[end] = None
        self._rest_start = self._rest_end = 0

    def _forget_before(self, end: int) -> None:
        """Take what has been sorted out of what has not, where a search has ended early."""
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
        """Take the smallest sorted chunk that is large enough out of its list."""
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
        """Set the mapping threshold and end its raising, as ``mallopt(M_MMAP_THRESHOLD)``.

        Free chunks and the trim threshold stay as they are: set late, it leaves the free blocks of the heap in use.
        """
        self._join_fast()
        self._map_from_bytes, self._is_dynamic = num_bytes, False

    def _cut_off(self, start: int, chunk_bytes: int) -> None:
        """Free what an aligned block leaves."""
        if chunk_bytes <= _CACHED_BYTES and len(self._cached[chunk_bytes >> 4]) < self._most_cached:
            self._cached[chunk_bytes >> 4].append(start)
        elif chunk_bytes <= _FAST_BYTES:
            self._fast[chunk_bytes >> 4].append(start)
            self._has_fast = True
        elif self._join((start,), chunk_bytes) >= _TRIM_FROM_BYTES:
            self._trim_top()

    def _join(self, starts: Iterable[int], chunk_bytes: int) -> int:
        """Join chunks of one size with what is free beside them, and return the bytes of what the last is part of."""
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
        """Join the small chunks that were freed since the last time."""
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
        """Give the top back if it has become too large."""
        self._join_fast()
        top_bytes = self._end - self._top
        if top_bytes < self._trim_from_bytes:
            self._most_left_bytes = max(self._most_left_bytes, top_bytes)
        else:
            self._least_trimmed_bytes = min(self._least_trimmed_bytes, top_bytes)
            self._shrink(self._top_pad_bytes)

    def _trim(self) -> None:
        """Give back whole free pages, as ``malloc_trim(0)``: inside the heap and at its top."""
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
    """A set of addresses, as intervals that do not touch each other's inside."""

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
        """Take a range out; ``None`` for everything from ``start`` on."""
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
    """The bytes of the chunks that blocks take."""
    padded_bytes = -(-(num_bytes + _HEADER_BYTES) // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES
    return np.maximum(padded_bytes, _LEAST_CHUNK_BYTES)


def _lead_bytes(start: int, alignment_bytes: int) -> int:
    """The bytes of the chunk that is cut off before the aligned one."""
    lead_bytes = -(start + _CHUNK_ALIGNMENT_BYTES) % alignment_bytes
    return lead_bytes + alignment_bytes if 0 < lead_bytes < _LEAST_CHUNK_BYTES else lead_bytes


def _round_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes
