"""The order is a permutation for every size, another one each epoch and seed, even, and the same everywhere."""

import itertools
from collections import Counter

import numpy as np
import pytest

from plimsoll.data.order import Order


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
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # mean + 4 standard deviations of its distribution


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
