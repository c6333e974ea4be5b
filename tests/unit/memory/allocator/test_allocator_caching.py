"""A simulation of torch's caching allocator: numbers by hand, and invariants for any sequence."""

import random
from itertools import pairwise

import pytest

from plimsoll.memory.allocator.caching import (
    CachingAllocator,
    SimulatedOutOfMemory,
    replay,
    rounded_bytes,
)
from plimsoll.records.allocator import MIB, AllocatorRules

EXPANDABLE = AllocatorRules(expandable_segments=True)


@pytest.mark.parametrize(
    ("num_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded first: no longer under 10 MiB
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not split off: it would have to be larger
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_what_one_request_takes(num_bytes: int, allocated_bytes: int, reserved_bytes: int):
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (
        num_bytes,
        allocated_bytes,
        reserved_bytes,
    )


def test_a_graph_has_blocks_of_its_own_and_begins_with_an_empty_cache():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    graph = allocator.allocate(30 * MIB, is_private=True)
    assert allocator.reserved_bytes == 30 * MIB  # the cached segment was freed
    allocator.free(graph)
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(30 * MIB, is_private=True)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB


def test_a_replay_is_told_what_is_a_graphs():
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB)]
    assert replay(events, CachingAllocator(), private={0}).reserved_bytes == [30 * MIB, 30 * MIB, 60 * MIB]
    assert replay(events, CachingAllocator()).reserved_bytes == [30 * MIB] * 3


def test_small_requests_share_a_segment_and_large_ones_too():
    allocator = CachingAllocator()
    first, second = allocator.allocate(MIB), allocator.allocate(MIB)
    assert (second - first, allocator.reserved_bytes) == (MIB, 2 * MIB)
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 42 * MIB


def test_the_best_fit_is_taken_and_at_equal_sizes_the_lowest_address():
    allocator = CachingAllocator()
    blocks = {size: allocator.allocate(size * MIB) for size in (30, 20, 24)}
    other = allocator.allocate(20 * MIB)
    for block in (*blocks.values(), other):
        allocator.free(block)
    assert allocator.allocate(20 * MIB) == min(blocks[20], other)
    assert other < blocks[20]  # the driver fills addresses from above
    assert allocator.allocate(21 * MIB) == blocks[24]
    assert allocator.reserved_bytes == 94 * MIB == allocator.peak_reserved_bytes


def test_free_neighbours_of_one_segment_merge_and_no_others():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(8)]  # two segments of 20 MiB
    for block in (blocks[0], blocks[2], blocks[1], blocks[3]):
        allocator.free(block)
    assert allocator.allocate(20 * MIB) == blocks[0]
    for block in (blocks[5], blocks[6]):
        allocator.free(block)
    assert allocator.allocate(10 * MIB) == blocks[5]
    assert allocator.reserved_bytes == 40 * MIB


def test_no_more_than_1_mib_stays_inside_a_large_block():
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB)
    allocator.free(block)
    assert allocator.allocate(19 * MIB) == block
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (19 * MIB, 20 * MIB)
    allocator.free(block)
    assert allocator.allocate(19 * MIB - 512) == block
    assert allocator.allocated_bytes == 19 * MIB - 512


def test_cached_segments_are_given_back_before_memory_is_out():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (80 * MIB, 1)
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_out_of_memory_says_what_was_there():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    blocks = [allocator.allocate(30 * MIB), allocator.allocate(5 * MIB)]
    allocator.free(allocator.allocate(40 * MIB))
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.allocate(51 * MIB)
    oom = caught.value
    assert (oom.requested_bytes, oom.segment_bytes, oom.limit_bytes) == (51 * MIB, 52 * MIB, 100 * MIB)
    assert (oom.allocated_bytes, oom.reserved_bytes) == (35 * MIB, 50 * MIB)  # 15 MiB of the 20 are split off: kept
    assert str(oom).startswith(f"{51 * MIB} bytes do not fit")
    allocator.free(blocks[1])
    allocator.allocate(51 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (82 * MIB, 2)


def test_fragments_can_be_out_of_memory_where_expandable_segments_are_not():
    deltas = [(number, 10 * MIB) for number in range(10)] + [(number, -1) for number in range(0, 10, 2)]
    fixed = replay([*deltas, (10, 20 * MIB)], CachingAllocator(limit_bytes=110 * MIB))
    assert (fixed.oom_at, fixed.peak_allocated_bytes) == (None, 100 * MIB)
    # Twice the size in segments of 40 MiB: the free halves of each cannot be given back.
    deltas = [(number, 40 * MIB) for number in range(3)] + [(number, -1) for number in range(3)]
    deltas += [(number, 20 * MIB) for number in range(3, 9)] + [(number, -1) for number in range(3, 9, 2)]
    assert replay([*deltas, (9, 60 * MIB)], CachingAllocator(limit_bytes=140 * MIB)).oom_at == len(deltas)
    expandable = replay([*deltas, (9, 60 * MIB)], CachingAllocator(EXPANDABLE, limit_bytes=140 * MIB))
    assert expandable.oom_at is None
    assert expandable.reserved_bytes[-1] == 120 * MIB


def test_an_expandable_segment_grows_by_pages_of_its_pool():
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate(25 * MIB) == first + 30 * MIB  # 10 MiB left of the second page, and one page more
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 62 * MIB
    assert allocator.allocate(5 * MIB - 512) == first + 55 * MIB
    assert allocator.allocate(5 * MIB) == first + 60 * MIB - 512  # 512 bytes are left before it, and are used
    assert allocator.reserved_bytes == 82 * MIB


def test_only_whole_free_pages_of_an_expandable_segment_are_given_back():
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(size * MIB) for size in (5, 50, 5)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (10 * MIB, 40 * MIB)  # pages 1 and 3 are in use
    assert allocator.allocate(55 * MIB) > blocks[2]  # 50 MiB between the two: too short, so behind them
    assert allocator.allocate(50 * MIB) == blocks[1]  # the page given back is filled again


def test_an_expandable_segment_keeps_its_growing_end_for_last():
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(size * MIB) for size in (18, 2, 8)]  # 12 MiB are free at the end
    allocator.free(blocks[0])
    assert allocator.allocate(5 * MIB) == blocks[0]


def test_blocks_from_max_split_on_are_kept_for_requests_of_their_size():
    allocator = CachingAllocator(AllocatorRules(max_split_bytes=100 * MIB))
    big = allocator.allocate(200 * MIB)
    allocator.free(big)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 250 * MIB
    other = allocator.allocate(180 * MIB)  # 20 MiB under the cached one: not nearly its size
    assert (other == big, allocator.reserved_bytes) == (False, 430 * MIB)
    assert allocator.allocate(181 * MIB) == big
    assert allocator.allocated_bytes == 430 * MIB  # and it is not split


def test_only_as_many_oversize_blocks_are_given_back_as_are_needed():
    rules = AllocatorRules(max_split_bytes=100 * MIB)
    allocator = CachingAllocator(rules, limit_bytes=600 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (120, 140, 160, 60)]:
        allocator.free(block)
    allocator.allocate(220 * MIB)  # the two largest, 160 + 140, make room
    assert (allocator.reserved_bytes, allocator.num_retries) == (400 * MIB, 0)


def test_above_the_threshold_the_oldest_garbage_goes_first():
    rules = AllocatorRules(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(rules, limit_bytes=200 * MIB)
    blocks = {size: allocator.allocate(size * MIB) for size in (40, 44, 48)}
    allocator.free(blocks[40])
    allocator.free(blocks[48])
    allocator.allocate(48 * MIB)
    allocator.free(blocks[44])
    allocator.allocate(60 * MIB)  # 132 MiB, 32 above the threshold: 40 MiB unused for two searches, 44 MiB for one
    assert allocator.reserved_bytes == (44 + 48 + 60) * MIB
    assert allocator.num_retries == 0
    assert allocator.allocate(44 * MIB) == blocks[44]


def test_power_of_two_divisions():
    rules = AllocatorRules(roundup_power2_divisions=4)
    assert [rounded_bytes(size, rules) for size in (100, 2000, 2048, 5000, 1200 * 1024, MIB)] == [
        512,
        2048,
        2048,
        5120,  # 4096, 5120, 6144, 7168
        1280 * 1024,
        MIB,
    ]
    by_size = AllocatorRules(roundup_power2_divisions=(0,) * 8 + (2,) * 8)  # from 256 MiB on
    assert rounded_bytes(200 * MIB + 1, by_size) == 200 * MIB + 512
    assert rounded_bytes(257 * MIB, by_size) == 384 * MIB


def test_a_replay_has_columns_and_peaks():
    deltas = [(7, 30 * MIB), (8, 5 * MIB), (7, -1), (9, 30 * MIB), (9, -30 * MIB), (7, 0)]
    done = replay(deltas, CachingAllocator())
    assert [count // MIB for count in done.allocated_bytes] == [30, 35, 5, 35, 5, 5]
    assert [count // MIB for count in done.reserved_bytes] == [30, 50, 50, 50, 50, 50]
    assert done.peak_allocated_bytes == 35 * MIB
    assert (done.peak_reserved_bytes, done.oom_at, done.oom) == (50 * MIB, None, None)
    assert set(done.live) == {7, 8}


def test_a_storage_of_no_bytes_comes_and_goes():
    done = replay([(1, 0), (2, 0), (1, 0), (1, 512)], CachingAllocator())
    assert (done.allocated_bytes, set(done.live)) == ([0, 0, 0, 512], {1, 2})


def test_a_replay_goes_on_from_another():
    allocator = CachingAllocator()
    first = replay([(1, 512), (2, 512)], allocator)
    second = replay([(1, -1), (2, -1)], allocator, first.live)
    assert (second.allocated_bytes, second.live, set(first.live)) == ([512, 0], {}, {1, 2})


def test_a_replay_ends_at_what_does_not_fit():
    done = replay([(1, 30 * MIB), (2, 30 * MIB), (1, -1)], CachingAllocator(limit_bytes=40 * MIB))
    assert (done.oom_at, len(done.reserved_bytes), done.peak_reserved_bytes) == (1, 1, 30 * MIB)
    assert done.oom is not None
    assert done.oom.requested_bytes == 30 * MIB


def test_an_empty_replay_has_no_peaks():
    done = replay([], CachingAllocator())
    assert (done.peak_reserved_bytes, done.peak_allocated_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("deltas", "said"),
    [([(1, 5), (1, 5)], "event 1, storage 1, 5 bytes: the storage is allocated"), ([(1, -5)], "is not allocated")],
)
def test_a_replay_refuses_what_no_program_does(deltas: list[tuple[int, int]], said: str):
    with pytest.raises(ValueError, match=said):
        replay(deltas, CachingAllocator())


def test_a_handle_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.allocate(5)
    allocator.free(block)
    with pytest.raises(KeyError):
        allocator.free(block)


RULES = {
    "default": AllocatorRules(),
    "expandable": EXPANDABLE,
    "max-split": AllocatorRules(max_split_bytes=24 * MIB),
    "divisions": AllocatorRules(roundup_power2_divisions=4),
    "garbage": AllocatorRules(garbage_collection_threshold=0.6),
}


def attempt(allocator: CachingAllocator, num_bytes: int) -> tuple[int, SimulatedOutOfMemory | None]:
    try:
        return allocator.allocate(num_bytes), None
    except SimulatedOutOfMemory as oom:
        return 0, oom


@pytest.mark.parametrize("limit_bytes", [None, 200 * MIB], ids=["unlimited", "limited"])
@pytest.mark.parametrize("rules", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("seed", range(3))
def test_what_holds_for_any_sequence(rules: AllocatorRules, limit_bytes: int | None, seed: int):
    chance = random.Random(seed)
    allocator = CachingAllocator(rules, limit_bytes)
    live: dict[int, int] = {}
    num_ooms = 0
    for _ in range(2000):
        if live and chance.random() < 0.48:
            block = chance.choice(list(live))
            allocator.free(block)
            del live[block]
        else:
            size = int(2 ** chance.uniform(0, 25))
            handle, oom = attempt(allocator, size)
            if oom is None:
                live[handle] = rounded_bytes(size, rules)
            else:
                num_ooms += 1
                needed_bytes = oom.segment_bytes + (20 * MIB if rules.expandable_segments else 0)  # and a page begun
                assert oom.reserved_bytes + needed_bytes > 200 * MIB
        assert sum(live.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.peak_allocated_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert limit_bytes is None or allocator.reserved_bytes <= limit_bytes
        ends = sorted((start, start + size) for start, size in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert (num_ooms > 0) == (limit_bytes is not None)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0, 0)
