"""The order of samples: a permutation for every size, different in each epoch and seed, and equal on every machine.

Draws belong to a sample and a place in it, are uniform and independent, and are equal on every machine.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.data.batches.order import (
    BlockOrder,
    BlockShuffle,
    Order,
    derived_seed,
    drawn,
    sample_keys,
    shuffled,
    uniform,
)


@pytest.mark.parametrize("num_samples", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097])
def test_every_order_is_a_permutation(num_samples: int):
    for seed, epoch in itertools.product((0, 1, 1 << 63), (0, 1, 2)):
        ids = Order(num_samples, seed).ids(epoch, 0, num_samples)
        assert ids.dtype == np.int64
        assert sorted(ids.tolist()) == list(range(num_samples))


def test_a_part_of_the_order_is_that_part():
    order = Order(1000, 3)
    whole = order.ids(2, 0, 1000)
    assert np.array_equal(order.ids(2, 250, 600), whole[250:600])
    assert np.array_equal(order.at(2, np.array([999, 0, 5])), whole[[999, 0, 5]])
    assert len(order.ids(2, 7, 7)) == 0


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    assert Order(10, 0).ids(0, 0, 10).tolist() == [9, 0, 4, 7, 5, 8, 6, 3, 2, 1]
    assert Order(10**9, 1).ids(5, 0, 4).tolist() == [949207651, 485474129, 299057767, 751849443]


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_about_equally_frequent(num_samples: int):
    num_seeds = 2400
    counts = Counter(tuple(Order(num_samples, seed).ids(0, 0, num_samples).tolist()) for seed in range(num_seeds))
    orders = list(itertools.permutations(range(num_samples)))
    expected = num_seeds / len(orders)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in orders)
    degrees = len(orders) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # mean + 4 standard deviations of chi-square


@pytest.mark.parametrize("num_samples", [7, 100])
def test_every_sample_comes_to_every_place_about_equally_often(num_samples: int):
    num_epochs = 2000
    order = Order(num_samples, 11)
    table = np.zeros((num_samples, num_samples))
    for epoch in range(num_epochs):
        table[np.arange(num_samples), order.ids(epoch, 0, num_samples)] += 1
    expected = num_epochs / num_samples
    degrees = (num_samples - 1) ** 2
    assert ((table - expected) ** 2 / expected).sum() < degrees + 4 * (2 * degrees) ** 0.5


def test_a_billion_samples_need_no_list():
    order = Order(10**9, 42)
    first, again, other = (order.ids(epoch, 123_456_789, 123_456_789 + 100_000) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert len(np.unique(first)) == 100_000
    assert first.min() >= 0
    assert first.max() < 10**9
    assert abs(first.mean() / 1e9 - 0.5) < 0.005  # 5 standard deviations of the mean
    assert np.count_nonzero(first == other) <= 2
    neighbours = np.corrcoef(first[:-1], first[1:])[0, 1]
    assert abs(neighbours) < 0.02


@pytest.mark.parametrize("num_samples", [1, 2, 5, 64, 1000, 4097])
def test_where_a_sample_comes_is_the_inverse(num_samples: int):
    order = Order(num_samples, 3)
    assert order.positions(2, order.ids(2, 0, num_samples)).tolist() == list(range(num_samples))
    unshuffled = drawn(num_samples, 3, shuffle=False)
    assert unshuffled.ids(2, 0, num_samples).tolist() == list(range(num_samples))
    assert unshuffled.positions(2, np.array([num_samples - 1])).tolist() == [num_samples - 1]


@given(
    num_samples=st.integers(1, 400),
    block_samples=st.integers(1, 70),
    pool_blocks=st.integers(1, 9),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_order_by_blocks_is_a_permutation(
    num_samples: int, block_samples: int, pool_blocks: int, seed: int, epoch: int
):
    order = drawn(num_samples, seed, BlockShuffle(block_samples, pool_blocks))
    ids = order.ids(epoch, 0, num_samples)
    assert sorted(ids.tolist()) == list(range(num_samples))
    assert np.array_equal(order.at(epoch, np.arange(num_samples)[::-1]), ids[::-1])
    assert np.array_equal(order.positions(epoch, ids), np.arange(num_samples))
    assert np.array_equal(order.ids(epoch, num_samples // 3, num_samples), ids[num_samples // 3 :])


def test_an_order_by_blocks_reads_each_block_in_one_pool():
    order = BlockOrder(10_000, 7, BlockShuffle(block_samples=100, pool_blocks=8))
    for epoch in range(2):
        pools = np.split(order.ids(epoch, 0, 10_000), range(800, 10_000, 800))
        blocks = [set((pool // 100).tolist()) for pool in pools]
        assert [len(some) for some in blocks] == [8] * 12 + [4]
        assert len(set.union(*blocks)) == 100
    first, second = (order.ids(epoch, 0, 800) for epoch in range(2))
    assert set((first // 100).tolist()) != set((second // 100).tolist())
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.15  # mixed in the pool, not block after block


def test_an_order_by_blocks_is_the_same_on_every_machine_and_needs_no_list():
    order = BlockOrder(10**9 + 1, 1, BlockShuffle())
    assert order.ids(5, 10**9 - 2, 10**9 + 1).tolist() == [85671820, 52978843, 607446731]
    assert order.positions(5, order.at(5, np.array([10**9, 17]))).tolist() == [10**9, 17]


def test_few_numbers_are_shuffled_and_seeds_told_apart():
    assert sorted(shuffled(50, 1).tolist()) == list(range(50))
    assert shuffled(50, 1).tolist() != shuffled(50, 2).tolist()
    assert (
        len({derived_seed(3), derived_seed(3, 0), derived_seed(3, 1), derived_seed(3, 0, 0), derived_seed(4, 0)}) == 5
    )


def test_draws_do_not_depend_on_the_other_samples():
    keys, lengths = sample_keys(3, 2, np.arange(5)), np.array([4, 1, 0, 7, 2])
    together = np.split(uniform(keys, 1, lengths), np.cumsum(lengths)[:-1])
    for number in range(5):
        alone = uniform(sample_keys(3, 2, np.array([number])), 1, lengths[number : number + 1])
        assert np.array_equal(together[number], alone)


def test_draws_are_the_same_on_every_machine_and_in_every_version():
    keys = sample_keys(1, 0, np.array([10**9]))
    assert keys.tolist() == [KEY]
    assert uniform(keys, 0, np.array([2])).tolist() == DRAWS


KEY, DRAWS = 1478996531775465068, [0.010572970773529033, 0.2826016438688945]


@pytest.mark.parametrize("what", ["seed", "epoch", "sample", "purpose"])
def test_draws_are_uniform_and_independent(what: str):
    num = 100_000
    lengths = np.array([num])
    one = uniform(sample_keys(0, 0, np.array([0])), 0, lengths)
    other = uniform(
        sample_keys(int(what == "seed"), int(what == "epoch"), np.array([int(what == "sample")])),
        int(what == "purpose"),
        lengths,
    )
    counts = np.bincount((one * 100).astype(int), minlength=100)
    assert ((counts - num / 100) ** 2 / (num / 100)).sum() < 99 + 4 * (2 * 99) ** 0.5  # mean + 4 standard deviations
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / num**0.5
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4 / num**0.5
