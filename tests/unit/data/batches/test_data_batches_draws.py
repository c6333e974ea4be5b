"""Draws belong to a sample and a place in it, look drawn at random, and are the same everywhere."""

import numpy as np
import pytest

from plimsoll.data.batches.draws import sample_keys, uniform


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
