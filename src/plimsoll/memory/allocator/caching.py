"""Pure-Python simulation of the memory that torch's CUDA caching allocator reserves for a sequence of allocations.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` at pytorch commit 001074d2. Sizes and options are from torch 2.13, see
`plimsoll.records.allocator`. The docstring of each method names the C++ function that it follows.

Not handled:

- several streams: a block freed on one stream is not reused on another
- several CUDA graphs
- ``cudaMallocAsync``
- memory outside the allocator (context, NCCL, cuFFT)
- reuse of the addresses of released segments
- gaps due to alignment
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import final

from plimsoll.records.allocator import AllocatorRules

_ADDRESS_SPACE_BYTES = 1 << 50
"""Address range of an expandable segment. torch takes 9/8 of device memory, and adds a range if that is too short."""
_HIGHEST_ADDRESS = 1 << 80


class SimulatedOutOfMemory(Exception):
    """A request that does not fit even after all cached segments were released.

    Attributes:
        requested_bytes: the size of the request.
        segment_bytes: the size that torch would have requested from the driver; its error message names this size.
        allocated_bytes: bytes in use, after cached segments were released.
        reserved_bytes: bytes held by the allocator, after cached segments were released.
        limit_bytes: the limit of the allocator.
    """

    def __init__(
        self, requested_bytes: int, segment_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int
    ) -> None:
        super().__init__(
            f"{requested_bytes} bytes do not fit: {reserved_bytes} of {limit_bytes} bytes are reserved, "
            f"{allocated_bytes} of them allocated"
        )
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


@final
class _Block:
    """An address range in a segment. ``before`` and ``after`` are its neighbors; without any, it is a whole segment."""

    __slots__ = ("address", "after", "before", "born", "is_free", "is_mapped", "num_bytes", "pool", "requested_bytes")

    def __init__(self, pool: _Pool, address: int, num_bytes: int, is_mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.num_bytes = num_bytes
        self.is_mapped = is_mapped
        self.is_free = True
        self.requested_bytes = 0
        self.born = 0
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def is_split(self) -> bool:
        return self.before is not None or self.after is not None

    def insert_after(self, block: _Block) -> None:
        """Link this block into the segment directly after ``block``."""
        self.before, self.after = block, block.after
        if block.after is not None:
            block.after.before = self
        block.after = self

    def cut(self, num_bytes: int) -> _Block:
        """Shorten this block to its first ``num_bytes``, and return a new block with the remaining bytes."""
        rest = _Block(self.pool, self.address + num_bytes, self.num_bytes - num_bytes, self.is_mapped)
        self.num_bytes = num_bytes
        rest.insert_after(self)
        return rest


class _Pool:
    """Free blocks in best-fit order, and unmapped address ranges in order of address."""

    def __init__(self, is_small: bool, page_bytes: int) -> None:
        self.is_small = is_small
        self.page_bytes = page_bytes
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []
        self.num_searches = 0

    def add(self, block: _Block) -> None:
        if block.is_mapped:
            block.born = self.num_searches
            insort(self.free, (block.num_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.num_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: _Block) -> None:
        """Merge a block outside the pool with its free neighbors, which leave the pool (`try_merge_blocks`)."""
        before, after = block.before, block.after
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self.remove(before)
            block.address = before.address
            block.num_bytes += before.num_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self.remove(after)
            block.num_bytes += after.num_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block


@final
class CachingAllocator:
    """Simulated allocator of one device and one stream.

    A limit represents either the device's capacity minus memory outside the allocator, or the per-process fraction. The
    two differ only with expandable segments: with a fraction, torch would let the last page (20 MiB) exceed the limit.
    Garbage collection needs a limit. In torch, only the per-process fraction enables it.

    Args:
        rules: sizes and options of the allocator; ``None`` for torch's defaults.
        limit_bytes: upper bound for reserved bytes; ``None`` for no bound.
    """

    def __init__(self, rules: AllocatorRules | None = None, limit_bytes: int | None = None) -> None:
        self.rules = rules if rules is not None else AllocatorRules()
        self.limit_bytes = limit_bytes
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_requested_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._small = _Pool(True, self.rules.small_segment_bytes)
        self._large = _Pool(False, self.rules.large_segment_bytes)
        self._private: tuple[_Pool, _Pool] | None = None  # small and large, of a captured graph; never released
        self._live: dict[int, _Block] = {}
        self._lowest_address = _HIGHEST_ADDRESS

    def allocate(self, num_bytes: int, *, is_private: bool = False) -> int:
        """Allocate a block and return its handle: its simulated address, or 0 for an empty request (`malloc`).

        Args:
            num_bytes: the size of the request.
            is_private: whether to allocate from the private pool of a captured graph. The first such request empties
                the cache, because training code empties it before a capture.

        Raises:
            SimulatedOutOfMemory: if the request does not fit even after cached segments were released.
        """
        if num_bytes == 0:
            return 0
        size_bytes = rounded_bytes(num_bytes, self.rules)
        if is_private and self._private is None:
            self.empty_cache()
            self._private = _Pool(True, self._small.page_bytes), _Pool(False, self._large.page_bytes)
        small, large = (self._private if is_private else None) or (self._small, self._large)
        pool = small if size_bytes <= self.rules.small_bytes else large
        block = self._best_fit(pool, size_bytes) or self._from_driver(pool, size_bytes, num_bytes)
        if self._is_split_for(block, size_bytes):
            pool.add(block.cut(size_bytes))
        block.is_free = False
        block.requested_bytes = num_bytes
        self._live[block.address] = block
        self.allocated_bytes += block.num_bytes
        self.requested_bytes += num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return block.address

    def free(self, block: int) -> None:
        """Free the block with this handle (`free_block`).

        Raises:
            KeyError: if no such block is allocated.
        """
        if block == 0:
            return
        freed = self._live.pop(block)
        self.allocated_bytes -= freed.num_bytes
        self.requested_bytes -= freed.requested_bytes
        freed.is_free = True
        freed.pool.merge(freed)
        freed.pool.add(freed)

    def place_of(self, block: int) -> tuple[int, int]:
        """Return the size in bytes of a block's segment and the block's offset in it."""
        first = last = self._live[block]
        while first.before is not None:
            first = first.before
        while last.after is not None:
            last = last.after
        return last.address + last.num_bytes - first.address, block - first.address

    def empty_cache(self) -> None:
        """Release all unused segments, or unused pages of expandable segments (`release_blocks`)."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):
                if self.rules.expandable_segments:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def segment_bytes(self, num_bytes: int) -> int:
        """Return the bytes to request from the driver if no cached block fits (`get_allocation_size`)."""
        if num_bytes <= self.rules.small_bytes:
            return self.rules.small_segment_bytes
        if num_bytes < self.rules.min_large_bytes:
            return self.rules.large_segment_bytes
        return _round_up(num_bytes, self.rules.round_large_bytes)

    def _best_fit(self, pool: _Pool, size_bytes: int) -> _Block | None:
        """Remove the smallest free block that fits from the pool and return it (`get_free_block`)."""
        pool.num_searches += 1
        place = bisect_left(pool.free, (size_bytes,))
        if place == len(pool.free):
            return None
        block = pool.free[place][2]
        if self.rules.expandable_segments:
            # An expandable block is ranked by the size that it can grow to, so that blocks with less growth come first.
            while place + 1 < len(pool.free) and _grown_bytes(pool.free[place + 1][2]) < _grown_bytes(block):
                place += 1
                block = pool.free[place][2]
        if not self._may_serve(block, size_bytes):
            return None
        del pool.free[place]
        return block

    def _may_serve(self, block: _Block, size_bytes: int) -> bool:
        """Return whether ``max_split_bytes`` lets a block serve a request.

        Oversize blocks serve only requests of nearly their size.
        """
        oversize_bytes = self.rules.max_split_bytes
        if oversize_bytes is None:
            return True
        if size_bytes < oversize_bytes:
            return block.num_bytes < oversize_bytes
        return block.num_bytes < size_bytes + self.rules.max_non_split_rounding_bytes

    def _is_split_for(self, block: _Block, size_bytes: int) -> bool:
        """Return whether the unused rest of a block becomes a separate free block (`should_split`)."""
        rest_bytes = block.num_bytes - size_bytes
        if block.pool.is_small or self.rules.expandable_segments:
            return rest_bytes >= self.rules.rounding_bytes
        is_oversize = self.rules.max_split_bytes is not None and size_bytes >= self.rules.max_split_bytes
        return not is_oversize and rest_bytes > self.rules.small_bytes

    def _from_driver(self, pool: _Pool, size_bytes: int, num_bytes: int) -> _Block:
        """Reserve memory from the driver; if it does not fit, release cached memory first (`malloc`, second half)."""
        self._collect_garbage()
        block = self._new_block(pool, size_bytes)
        if block is None and self._release_oversize(pool, size_bytes):
            block = self._new_block(pool, size_bytes)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new_block(pool, size_bytes)
        if block is None:
            assert self.limit_bytes is not None
            raise SimulatedOutOfMemory(
                num_bytes, self.segment_bytes(size_bytes), self.allocated_bytes, self.reserved_bytes, self.limit_bytes
            )
        return block

    def _new_block(self, pool: _Pool, size_bytes: int) -> _Block | None:
        """Reserve a new segment, or grow an expandable one (`alloc_block`)."""
        segment_bytes = self.segment_bytes(size_bytes)
        if not self._fits(segment_bytes):
            return None
        if self.rules.expandable_segments:
            return self._grow(pool, size_bytes)
        self._reserve(segment_bytes)
        return _Block(pool, self._new_address(segment_bytes), segment_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + num_bytes <= self.limit_bytes

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_address(self, num_bytes: int) -> int:
        # The driver assigns addresses from the top down (tests/recordings). The order decides which block is split:
        # among free blocks of equal size, torch takes the one at the lowest address.
        self._lowest_address -= _round_up(num_bytes, _ADDRESS_SPACE_BYTES)
        return self._lowest_address

    def _release(self, block: _Block) -> None:
        """Release a whole segment (`release_block`)."""
        block.pool.remove(block)
        self.reserved_bytes -= block.num_bytes

    def _release_oversize(self, pool: _Pool, size_bytes: int) -> bool:
        """Release one large enough oversize block, or else several of them (`release_available_cached_blocks`)."""
        oversize_bytes = self.rules.max_split_bytes
        if oversize_bytes is None or self.rules.expandable_segments:
            return False
        needed_bytes = max(size_bytes, oversize_bytes)
        place = bisect_left(pool.free, (needed_bytes,))
        if place < len(pool.free):
            self._release(pool.free[place][2])
            return True
        released_bytes = 0
        while released_bytes < needed_bytes and pool.free and pool.free[-1][0] >= oversize_bytes:
            released_bytes += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released_bytes >= needed_bytes

    def _collect_garbage(self) -> None:
        """Release the oldest unused large segments, down to the threshold (`garbage_collect_cached_blocks`)."""
        threshold = self.rules.garbage_collection_threshold
        if threshold is None or self.limit_bytes is None or self.rules.expandable_segments:
            return
        target_bytes = self.reserved_bytes - int(threshold * self.limit_bytes)
        ages = {block: self._large.num_searches - block.born for _, _, block in self._large.free if not block.is_split}
        while ages and target_bytes > 0:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                target_bytes -= block.num_bytes
                del ages[block]
                self._release(block)

    def _grow(self, pool: _Pool, size_bytes: int) -> _Block | None:
        """Map memory into the lowest address range that is long enough (`try_allocate_expandable_block`)."""
        block = _growable(pool, size_bytes) or self._new_range(pool)
        if not block.is_mapped and not self._map(block, min(block.num_bytes, size_bytes)):
            return None
        while block.num_bytes < size_bytes:
            after = block.after
            assert after is not None  # `_growable` has checked that enough free neighbors follow
            if not self._map(after, min(size_bytes - block.num_bytes, after.num_bytes)):
                return None
            block = after  # `_map` has merged the previous block into it
        pool.remove(block)
        return block

    def _new_range(self, pool: _Pool) -> _Block:
        """Reserve addresses for an expandable segment, as whole unmapped pages."""
        pages = _round_up(_ADDRESS_SPACE_BYTES, pool.page_bytes)
        start = _round_up(self._new_address(2 * pages), pool.page_bytes)
        block = _Block(pool, start, pages, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: _Block, num_bytes: int) -> bool:
        """Map whole pages at the start of a range and merge it with its free neighbors (`map_block`)."""
        pool = block.pool
        mapped_bytes = _round_up(num_bytes, pool.page_bytes)
        if not self._fits(mapped_bytes):
            return False
        pool.remove(block)
        if mapped_bytes < block.num_bytes:
            pool.add(block.cut(mapped_bytes))
        block.is_mapped = True
        pool.merge(block)
        pool.add(block)
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, block: _Block) -> None:
        """Unmap the whole pages inside a free block (`unmap_block`). Partial pages at its ends stay mapped and free."""
        pool = block.pool
        start = _round_up(block.address, pool.page_bytes)
        num_bytes = (block.address + block.num_bytes) // pool.page_bytes * pool.page_bytes - start
        if num_bytes <= 0:
            return
        pool.remove(block)
        if start > block.address:
            front, block = block, block.cut(start - block.address)
            pool.add(front)
        if block.num_bytes > num_bytes:
            pool.add(block.cut(num_bytes))
        block.is_mapped = False
        pool.merge(block)
        pool.add(block)
        self.reserved_bytes -= num_bytes


def rounded_bytes(num_bytes: int, rules: AllocatorRules) -> int:
    """Return the bytes of a segment that a request occupies (`round_size`, `roundup_power2_next_division`)."""
    divisions = rules.divisions(num_bytes)
    if divisions > 1 and num_bytes > rules.rounding_bytes * divisions:
        power_bytes = 1 << (num_bytes.bit_length() - 1)
        return _round_up(num_bytes, power_bytes // (1 << (divisions.bit_length() - 1)))
    return _round_up(num_bytes, rules.rounding_bytes)


@dataclass(frozen=True)
class Replay:
    """Result of replaying events through an allocator. The columns have a row for each completed event.

    Attributes:
        allocated_bytes: bytes in use after each event.
        reserved_bytes: bytes held by the allocator after each event.
        live: the block handle of each storage that is still allocated, by storage id.
        oom_at: the index of the event that did not fit, at which the replay stopped; ``None`` if all events fit.
        oom: the error of that event.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    live: dict[int, int]
    oom_at: int | None = None
    oom: SimulatedOutOfMemory | None = None

    @cached_property
    def peak_allocated_bytes(self) -> int:
        """Maximum of `allocated_bytes`; 0 without events."""
        return max(self.allocated_bytes, default=0)

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """Maximum of `reserved_bytes`; 0 without events."""
        return max(self.reserved_bytes, default=0)


def replay(
    deltas: Iterable[tuple[int, int]],
    allocator: CachingAllocator,
    live: dict[int, int] | None = None,
    private: Collection[int] = (),
) -> Replay:
    """Replay allocations and frees through an allocator, in order.

    Args:
        deltas: events ``(storage id, bytes)``. Negative bytes free the storage. A storage of 0 bytes is freed by its
            second event. An id may be reused after its storage was freed.
        allocator: the allocator; its state changes.
        live: storages allocated earlier (`Replay.live` of a previous call); not changed.
        private: ids of the storages in the private pool of a CUDA graph.

    Raises:
        ValueError: if a storage is allocated twice, or freed without having been allocated.
    """
    handles = dict(live or {})
    allocated_bytes: list[int] = []
    reserved_bytes: list[int] = []
    oom: SimulatedOutOfMemory | None = None
    for at, (storage, num_bytes) in enumerate(deltas):
        is_freed = num_bytes < 0 or (num_bytes == 0 and storage in handles)
        if is_freed != (storage in handles):
            state = "is allocated already" if storage in handles else "is not allocated"
            raise ValueError(f"event {at}, storage {storage}, {num_bytes} bytes: the storage {state}")
        try:
            if is_freed:
                allocator.free(handles.pop(storage))
            else:
                handles[storage] = allocator.allocate(num_bytes, is_private=storage in private)
        except SimulatedOutOfMemory as error:
            oom = error
            break
        allocated_bytes.append(allocator.allocated_bytes)
        reserved_bytes.append(allocator.reserved_bytes)
    return Replay(allocated_bytes, reserved_bytes, handles, len(allocated_bytes) if oom else None, oom)


def _growable(pool: _Pool, size_bytes: int) -> _Block | None:
    """Return the lowest start of adjacent free and unmapped blocks that hold a request (`find_expandable_block`)."""
    for _, unmapped in pool.unmapped:
        before = unmapped.before
        first = before if before is not None and before.is_free else unmapped
        num_bytes = 0
        block: _Block | None = first
        while num_bytes < size_bytes and block is not None and block.is_free:
            num_bytes += block.num_bytes
            block = block.after
        if num_bytes >= size_bytes:
            return first
    return None


def _grown_bytes(block: _Block) -> int:
    after = block.after
    return block.num_bytes + (after.num_bytes if after is not None and not after.is_mapped else 0)


def _round_up(num_bytes: int, step_bytes: int) -> int:
    return -(-num_bytes // step_bytes) * step_bytes
