"""A simple simulation of glibc's malloc, one call at a time: the reference for `plimsoll.memory.allocator.glibc`.

It was the original simulation before the faster one, and is unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from plimsoll.memory.allocator.heap_calls import NODE_OBJECTS_BYTES
from plimsoll.records.allocator import HeapRules

_HEADER_BYTES = 8
_CHUNK_ALIGNMENT_BYTES = 16
_LEAST_CHUNK_BYTES = 32
_CHUNK_STRUCT_BYTES = 48  # malloc_trim keeps the links of a free chunk
_SMALL_BYTES = 1024
_CACHED_BYTES = 1040  # the largest chunk in the thread's cache
_FAST_BYTES = 128  # the largest chunk that is not joined with its neighbours at once
_TRIM_FROM_BYTES = 65536  # FASTBIN_CONSOLIDATION_THRESHOLD: a smaller free block never trims the top
_HIGHEST_THRESHOLD_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX
_MOST_MAPPINGS = 65536  # M_MMAP_MAX


Handles = tuple[int, ...]
"""Handles of a storage and the blocks allocated with it, or of an autograd node, in the order of their frees."""


class HeapReplay(NamedTuple):
    """The effect of a sequence of events on a heap."""

    resident_bytes: list[int]
    """Values after each event."""
    address_bytes: list[int]
    """Values after each event."""
    peak_bytes: int
    index_of_highest: int
    """The index of the event that first reached the peak; -1 if no event exceeded the initial value."""
    live: dict[int, Handles]
    """The handles of each storage that is not freed."""


class _Mapped(NamedTuple):
    mapped_bytes: int
    chunk_bytes: int
    resident_bytes: int
    num_bytes: int


class _InHeap(NamedTuple):
    start: int
    chunk_bytes: int
    num_bytes: int


class GlibcHeap:
    """The main arena of a process without free blocks; every block counts as written completely.

    ``start_bytes`` is the address of the first block; only its remainder by the alignment matters.
    """

    def __init__(self, rules: HeapRules, start_bytes: int = 0) -> None:
        self.rules = rules
        self.live_bytes = 0
        self.peak_resident_bytes = 0
        self._mmap_threshold_bytes = rules.mmap_threshold_bytes
        self._trim_threshold_bytes = rules.trim_threshold_bytes
        self._live: dict[int, _Mapped | _InHeap] = {}
        self._num_handles = 0
        self._num_mappings = 0
        self._mapped_bytes = 0
        self._mapped_resident_bytes = 0
        self._free = _FreeChunks()
        self._start = start_bytes
        self._top = start_bytes  # start of the top chunk, above every block
        self._end = start_bytes  # end of the heap: the program break
        self._touched_end = 0
        self._given_back = _Intervals()
        self._cached: dict[int, list[int]] = {}
        self._most_cached = rules.num_cached_per_size
        self._fast: dict[int, list[int]] = {}

    @property
    def resident_bytes(self) -> int:
        """Resident bytes: pages of live mappings, and all touched pages of the heap that were not returned."""
        heap_bytes = _round_up(self._touched_end, self.rules.page_bytes) - self._given_back.total_bytes
        return self._mapped_resident_bytes + heap_bytes

    @property
    def address_bytes(self) -> int:
        """Bytes that count for a limit on address space: the heap with its holes, resident or not."""
        return self._mapped_bytes + self._end - self._start

    def allocate(self, num_bytes: int) -> int:
        """Allocate a block, write to all of it, and return its handle."""
        self._num_handles += 1
        handle = self._num_handles
        if num_bytes == 0:  # torch never asks for zero bytes
            self._live[handle] = _Mapped(0, 0, 0, 0)
            return handle
        chunk_bytes = _chunk_bytes(num_bytes)
        wanted_bytes = _chunk_bytes(chunk_bytes + self.rules.alignment_bytes + _LEAST_CHUNK_BYTES)
        start = self._find(wanted_bytes)
        if start is None:
            self._live[handle] = self._map(wanted_bytes, num_bytes)
        else:
            self._live[handle] = self._align(*start, chunk_bytes, num_bytes)
        self.live_bytes += num_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        return handle

    def allocate_small(self, num_bytes: int) -> int:
        """Allocate a block of up to 1,032 bytes as ``malloc`` does, write to it, and return its handle.

        Such blocks come from the thread's cache and from the fast lists before any search. They are therefore between
        the tensors, and prevent free memory there from being joined and returned.
        """
        self._num_handles += 1
        chunk_bytes = _chunk_bytes(num_bytes)
        found = self._take_small(chunk_bytes) or self._find(chunk_bytes)
        if found is None:
            self._live[self._num_handles] = self._map(chunk_bytes, num_bytes)
        else:
            self._live[self._num_handles] = self._touched(*found, num_bytes)
        self.live_bytes += num_bytes
        return self._num_handles

    def free(self, handle: int) -> None:
        """Return a block to the heap, or to the system.

        Raises:
            KeyError: if no live block has this handle.
        """
        block = self._live.pop(handle)
        self.live_bytes -= block.num_bytes
        if isinstance(block, _InHeap):
            self._release(block.start, block.chunk_bytes)
        elif block.chunk_bytes:
            self._unmap(block)

    def trim(self) -> None:
        """Return whole free pages inside the heap and at its top to the system, like ``malloc_trim(0)``."""
        self._join_fast()
        page_bytes = self.rules.page_bytes
        for start, chunk_bytes in self._free.chunks():
            first = _round_up(start + _CHUNK_STRUCT_BYTES, page_bytes)
            last = (start + chunk_bytes) // page_bytes * page_bytes
            if last > first:
                self._given_back.add(first, last)
        self._shrink(pad_bytes=0)

    def map_blocks_from(self, num_bytes: int) -> None:
        """Set the mapping threshold and make it static, like ``mallopt(M_MMAP_THRESHOLD)``.

        Free chunks and the trim threshold do not change: if it is set late, the heap's free blocks remain in use.
        """
        self._join_fast()
        self.rules = self.rules.model_copy(update={"mmap_threshold_bytes": num_bytes, "is_dynamic": False})
        self._mmap_threshold_bytes = num_bytes

    def _take_small(self, chunk_bytes: int) -> tuple[int, int] | None:
        """Take a chunk of exactly this size from the thread's cache, or from the fast list, which fills the cache."""
        cached = self._cached.setdefault(chunk_bytes, [])
        if cached:
            return cached.pop(), chunk_bytes
        fast = self._fast.get(chunk_bytes)
        if not fast:
            return None
        start = fast.pop()
        while fast and len(cached) < self._most_cached:
            cached.append(fast.pop())
        if not fast:
            del self._fast[chunk_bytes]
        return start, chunk_bytes

    def _find(self, wanted_bytes: int) -> tuple[int, int] | None:
        """Take a chunk of the heap, or return None if the block becomes a mapping."""
        if wanted_bytes >= _SMALL_BYTES:
            self._join_fast()
        found = self._free.take(wanted_bytes)
        if found is not None:
            return found
        if self._end - self._top < wanted_bytes + _LEAST_CHUNK_BYTES:
            if self._join_fast():
                return self._find(wanted_bytes)
            if wanted_bytes >= self._mmap_threshold_bytes and self._num_mappings < _MOST_MAPPINGS:
                return None
            needed_bytes = wanted_bytes + self.rules.top_pad_bytes + _LEAST_CHUNK_BYTES - (self._end - self._top)
            self._end += _round_up(needed_bytes, self.rules.page_bytes)
        start = self._top
        self._top += wanted_bytes
        return start, wanted_bytes

    def _align(self, start: int, found_bytes: int, chunk_bytes: int, num_bytes: int) -> _InHeap:
        """Cut the aligned chunk out of the found one, and free the rest on both sides."""
        lead_bytes = self._lead_bytes(start)
        if lead_bytes:
            self._release(start, lead_bytes)
            start, found_bytes = start + lead_bytes, found_bytes - lead_bytes
        if found_bytes > chunk_bytes + _LEAST_CHUNK_BYTES:
            self._release(start + chunk_bytes, found_bytes - chunk_bytes)
            found_bytes = chunk_bytes
        return self._touched(start, found_bytes, num_bytes)

    def _touched(self, start: int, chunk_bytes: int, num_bytes: int) -> _InHeap:
        """Return a block in the heap, with its pages resident."""
        end = start + chunk_bytes
        if self._given_back.total_bytes:
            page_bytes = self.rules.page_bytes
            self._given_back.remove(start // page_bytes * page_bytes, _round_up(end, page_bytes))
        self._touched_end = max(self._touched_end, end)
        return _InHeap(start, chunk_bytes, num_bytes)

    def _lead_bytes(self, start: int) -> int:
        alignment_bytes = self.rules.alignment_bytes
        lead_bytes = -(start + _CHUNK_ALIGNMENT_BYTES) % alignment_bytes
        return lead_bytes + alignment_bytes if 0 < lead_bytes < _LEAST_CHUNK_BYTES else lead_bytes

    def _map(self, wanted_bytes: int, num_bytes: int) -> _Mapped:
        page_bytes, lead_bytes = self.rules.page_bytes, self._lead_bytes(0)
        mapped_bytes = _round_up(wanted_bytes + _HEADER_BYTES, page_bytes)
        resident_bytes = _round_up(lead_bytes + _CHUNK_ALIGNMENT_BYTES + num_bytes, page_bytes)
        self._num_mappings += 1
        self._mapped_bytes += mapped_bytes
        self._mapped_resident_bytes += resident_bytes
        return _Mapped(mapped_bytes, mapped_bytes - lead_bytes, resident_bytes, num_bytes)

    def _unmap(self, block: _Mapped) -> None:
        self._num_mappings -= 1
        self._mapped_bytes -= block.mapped_bytes
        self._mapped_resident_bytes -= block.resident_bytes
        if self.rules.is_dynamic and self._mmap_threshold_bytes < block.chunk_bytes <= _HIGHEST_THRESHOLD_BYTES:
            self._mmap_threshold_bytes = block.chunk_bytes
            self._trim_threshold_bytes = 2 * block.chunk_bytes

    def _release(self, start: int, chunk_bytes: int) -> None:
        """Join a chunk with its free neighbours, and trim the top if it has become too large."""
        cached = self._cached.setdefault(chunk_bytes, []) if chunk_bytes <= _CACHED_BYTES else None
        if cached is not None and len(cached) < self._most_cached:
            cached.append(start)
        elif chunk_bytes <= _FAST_BYTES:
            self._fast.setdefault(chunk_bytes, []).append(start)
        else:
            joined_bytes = self._join(start, chunk_bytes)
            if joined_bytes >= _TRIM_FROM_BYTES:
                self._join_fast()
                if self._end - self._top >= self._trim_threshold_bytes:
                    self._shrink(self.rules.top_pad_bytes)

    def _join(self, start: int, chunk_bytes: int) -> int:
        """Join a chunk with its free neighbours, and return the bytes of the result."""
        start, end = self._free.join(start, start + chunk_bytes)
        if end == self._top:
            self._top = start
            return self._end - start
        self._free.add(start, end - start)
        return end - start

    def _join_fast(self) -> bool:
        """Join the small chunks that were freed since the last call; return False if there was no chunk."""
        if not self._fast:
            return False
        for chunk_bytes, starts in sorted(self._fast.items()):
            for start in reversed(starts):
                self._join(start, chunk_bytes)
        self._fast.clear()
        return True

    def _shrink(self, pad_bytes: int) -> None:
        spare_bytes = self._end - self._top - _LEAST_CHUNK_BYTES - 1 - pad_bytes
        if spare_bytes >= self.rules.page_bytes:
            self._end -= spare_bytes // self.rules.page_bytes * self.rules.page_bytes
            self._touched_end = min(self._touched_end, self._end)
            self._given_back.remove(_round_up(self._touched_end, self.rules.page_bytes), None)


def replay(
    deltas: Iterable[tuple[int, int]],
    heap: GlibcHeap,
    live: dict[int, Handles] | None = None,
    beside_bytes: tuple[int, ...] = (),
    trims_before: Collection[int] = (),
    nodes_before: Mapping[int, int] | None = None,
    thresholds_before: Mapping[int, int] | None = None,
) -> HeapReplay:
    """Replay a trace on a heap: ``(storage id, bytes to allocate)``, with negative bytes for the storage's free.

    An id may be used again after its free. To continue with a heap, pass the ``live`` of the previous replay.
    ``beside_bytes`` are small blocks that are allocated and freed with each storage (see `TENSOR_OBJECTS_BYTES`). Free
    pages are returned before the deltas with the indexes ``trims_before``. ``nodes_before`` has numbers of nodes (see
    `NODE_OBJECTS_BYTES`) that are allocated before the delta with an index or, if negative, freed, the newest first.
    ``thresholds_before`` are sizes from which blocks are mapped, starting at a delta.

    Raises:
        KeyError: if a storage is freed that is not live.
    """
    handles = dict(live or {})
    resident_bytes: list[int] = []
    address_bytes: list[int] = []
    peak_bytes, index_of_highest = heap.resident_bytes, -1
    nodes: list[Handles] = []
    changes, thresholds = nodes_before or {}, thresholds_before or {}
    for index, (storage, num_bytes) in enumerate(deltas):
        if index in trims_before:
            heap.trim()
        if index in thresholds:
            heap.map_blocks_from(thresholds[index])
        if index in changes:
            _change_nodes(heap, nodes, changes[index])
        if num_bytes < 0:
            for handle in handles.pop(storage):
                heap.free(handle)
        else:
            handles[storage] = _allocate_tensor(heap, num_bytes, beside_bytes)
        now_bytes = heap.resident_bytes
        resident_bytes.append(now_bytes)
        address_bytes.append(heap.address_bytes)
        if now_bytes > peak_bytes:
            peak_bytes, index_of_highest = now_bytes, index
    return HeapReplay(resident_bytes, address_bytes, peak_bytes, index_of_highest, handles)


def _allocate_tensor(heap: GlibcHeap, num_bytes: int, beside_bytes: tuple[int, ...]) -> Handles:
    """Allocate a tensor's data and its small blocks; return the handles in the order of their frees."""
    before = tuple(map(heap.allocate_small, beside_bytes[:1]))
    data = heap.allocate(num_bytes)
    behind = tuple(map(heap.allocate_small, beside_bytes[1:]))
    return (*behind[1:], data, *before, *behind[:1])


def _change_nodes(heap: GlibcHeap, nodes: list[Handles], change: int) -> None:
    for _ in range(change):
        sizes = NODE_OBJECTS_BYTES[len(nodes) % len(NODE_OBJECTS_BYTES)]
        nodes.append(tuple(map(heap.allocate_small, sizes)))
    for _ in range(-change):
        for handle in nodes.pop():
            heap.free(handle)


class _FreeChunks:
    """Free chunks by address and by size; those freed since the last search are unsorted, in the order of their frees.

    Among equal sizes, the chunk that was sorted last is taken. glibc takes the second chunk of a list and inserts each
    new one as the second.
    """

    def __init__(self) -> None:
        self._bytes_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._unsorted: OrderedDict[int, None] = OrderedDict()
        self._sorted: list[tuple[int, int, int]] = []  # (bytes, minus the number of the sort, start)
        self._turn_at: dict[int, int] = {}
        self._num_turns = 0
        self._last_remainder = -1

    def chunks(self) -> Iterable[tuple[int, int]]:
        return self._bytes_at.items()

    def add(self, start: int, chunk_bytes: int) -> None:
        self._bytes_at[start] = chunk_bytes
        self._start_by_end[start + chunk_bytes] = start
        self._unsorted[start] = None

    def join(self, start: int, end: int) -> tuple[int, int]:
        """Remove the chunks that touch this range, and return the range extended by them."""
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._bytes_at:
            behind = end
            end += self._bytes_at[behind]
            self._remove(behind)
        return start, end

    def take(self, wanted_bytes: int) -> tuple[int, int] | None:
        """Find a chunk, cut it to size, and return its start and bytes."""
        start = self._sort_until(wanted_bytes)
        if start is None:
            index = bisect_left(self._sorted, (wanted_bytes,))
            if index == len(self._sorted):
                return None
            start = self._sorted[index][2]
        chunk_bytes = self._bytes_at[start]
        self._remove(start)
        if chunk_bytes - wanted_bytes < _LEAST_CHUNK_BYTES:
            return start, chunk_bytes
        self.add(start + wanted_bytes, chunk_bytes - wanted_bytes)
        if wanted_bytes < _SMALL_BYTES:
            self._last_remainder = start + wanted_bytes
        return start, wanted_bytes

    def _sort_until(self, wanted_bytes: int) -> int | None:
        """Sort the chunks that were freed since the last search, up to a chunk of exactly this size."""
        while self._unsorted:
            start = next(iter(self._unsorted))
            chunk_bytes = self._bytes_at[start]
            is_only_remainder = start == self._last_remainder and len(self._unsorted) == 1
            if wanted_bytes < _SMALL_BYTES and is_only_remainder and chunk_bytes > wanted_bytes + _LEAST_CHUNK_BYTES:
                return start
            if chunk_bytes == wanted_bytes:
                return start
            del self._unsorted[start]
            self._num_turns += 1
            self._turn_at[start] = self._num_turns
            insort(self._sorted, (chunk_bytes, -self._num_turns, start))
        return None

    def _remove(self, start: int) -> None:
        chunk_bytes = self._bytes_at.pop(start)
        del self._start_by_end[start + chunk_bytes]
        if start in self._unsorted:
            del self._unsorted[start]
        else:
            turn = self._turn_at.pop(start)
            del self._sorted[bisect_left(self._sorted, (chunk_bytes, -turn, start))]


class _Intervals:
    """A set of addresses, as disjoint intervals."""

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
        """Remove a range; None removes everything from ``start`` on."""
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


def _chunk_bytes(num_bytes: int) -> int:
    padded_bytes = -(-(num_bytes + _HEADER_BYTES) // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES
    return padded_bytes if padded_bytes > _LEAST_CHUNK_BYTES else _LEAST_CHUNK_BYTES


def _round_up(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes
