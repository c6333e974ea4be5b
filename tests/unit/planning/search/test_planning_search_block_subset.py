"""The integer program for blocks gives the same result as trying every subset."""

import random
from itertools import combinations

import pytest

from plimsoll.planning.search.block_subset import choose_blocks


def needs(saved, kept, chosen):
    """Return the memory at the start of each block's backward."""
    return [
        saved[block] + sum(kept[earlier] if earlier in chosen else saved[earlier] for earlier in range(block))
        for block in range(len(saved))
    ]


def least_seconds(saved, seconds, kept, room):
    subsets = (subset for size in range(len(saved) + 1) for subset in combinations(range(len(saved)), size))
    fitting = [sum(seconds[i] for i in subset) for subset in subsets if max(needs(saved, kept, subset)) <= room]
    return min(fitting, default=None)


def test_by_hand():
    """Four blocks save 10 and keep 1. The last one's backward needs 40, or 31 with one checkpointed, or 22 with two."""
    saved, kept = [10] * 4, [1] * 4
    assert choose_blocks(saved, [1.0] * 4, kept, 40) == ()
    assert len(choose_blocks(saved, [1.0] * 4, kept, 39)) == 1
    assert choose_blocks(saved, [3.0, 1.0, 2.0, 0.5], kept, 31) == (1,)
    assert choose_blocks(saved, [3.0, 1.0, 2.0, 0.5], kept, 22) == (1, 2)
    assert choose_blocks(saved, [1.0] * 4, kept, 13) == (0, 1, 2)
    assert choose_blocks(saved, [1.0] * 4, kept, 12) is None


def test_a_large_block_early_is_what_its_own_backward_needs():
    assert choose_blocks([50, 10], [1.0, 1.0], [1, 1], 50) == (0,)
    assert choose_blocks([50, 10], [1.0, 1.0], [1, 1], 49) is None


def test_no_blocks_and_blocks_that_keep_more_when_recomputed():
    assert choose_blocks([], [], [], 0) == ()
    assert choose_blocks([5, 5, 5], [0.0, 0.0, 0.0], [9, 1, 9], 11) == (1,)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("unit", [1, 2**30 + 7], ids=["bytes", "GiB"])
def test_against_every_subset(seed, unit):
    """The limits include totals that a subset fills to the last byte."""
    draw = random.Random(seed)
    num_blocks = draw.randint(1, 8)
    saved = [draw.randint(1, 100) * unit for _ in range(num_blocks)]
    kept = [draw.randint(0, 20) * unit for _ in range(num_blocks)]
    seconds = [draw.randint(1, 9) / 7 for _ in range(num_blocks)]
    some = [block for block in range(num_blocks) if draw.random() < 0.5]
    for room in (max(needs(saved, kept, some)), max(needs(saved, kept, some)) - 1, draw.randint(1, sum(saved))):
        chosen = choose_blocks(saved, seconds, kept, room)
        best = least_seconds(saved, seconds, kept, room)
        if best is None:
            assert chosen is None
            continue
        assert max(needs(saved, kept, chosen)) <= room
        assert sum(seconds[block] for block in chosen) == pytest.approx(best)
        assert chosen == choose_blocks(saved, seconds, kept, room)


def test_a_deep_model():
    """With 96 blocks of two kinds, the choice fits, and it no longer fits with one cheap block fewer."""
    saved = [300_000_000 + 1000 * (block % 2) for block in range(96)]
    kept, seconds = [25_000_000] * 96, [0.01 + 0.001 * (block % 3) for block in range(96)]
    room = 10_000_000_000
    chosen = choose_blocks(saved, seconds, kept, room)
    assert max(needs(saved, kept, chosen)) <= room
    assert all(max(needs(saved, kept, set(chosen) - {block})) > room for block in chosen)
