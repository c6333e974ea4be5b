"""The shuffled order of every epoch as a function of (seed, epoch, position): no list, no state, any size.

A Feistel network is a bijection of the numbers of b bits whatever its round function is; here b is the fewest bits that
hold ``num_samples``, and a result beyond the last sample is sent through again until it is one ("cycle walking", Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, https://doi.org/10.1007/3-540-45760-7_9): fewer than
two passes on average. All arithmetic is in unsigned 64-bit integers, so the order is the same on every machine. It is
as good as random for training, and NOT for cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 12  # of half a domain each; with 8, some orders of 5 samples are twice as frequent as others
_MASK64 = (1 << 64) - 1
# The finaliser and the increment of SplitMix64: Steele, Lea, Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195
_INCREMENT, _MULTIPLIERS, _SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)


class Order:
    """A permutation of ``num_samples`` samples for each epoch."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        num_bits = (num_samples - 1).bit_length()
        self._low_bits = np.uint64(num_bits // 2)
        self._high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
        self._low_mask = np.uint64((1 << (num_bits // 2)) - 1)

    def ids(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions ``start`` to ``stop`` (not included) of the epoch's order."""
        assert 0 <= start <= stop <= self.num_samples, (start, stop, self.num_samples)
        return self.at(epoch, np.arange(start, stop))

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at some positions, from 0 to less than `num_samples`, of the epoch's order."""
        keys = _round_keys(self.seed, epoch)
        samples = self._permuted(positions.astype(np.uint64), keys)
        outside = np.flatnonzero(samples >= self.num_samples)
        while len(outside):
            samples[outside] = self._permuted(samples[outside], keys)
            outside = outside[samples[outside] >= self.num_samples]
        return samples.astype(np.int64)

    def _permuted(self, numbers: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        for key_high, key_low in zip(keys[::2], keys[1::2], strict=True):
            high ^= _mixed(low + key_high) & self._high_mask
            low ^= _mixed(high + key_low) & self._low_mask
        return (high << self._low_bits) | low


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    of_epoch = _mixed(np.array([epoch + 1], np.uint64)) + np.uint64(seed * _INCREMENT & _MASK64)
    return list(_mixed(of_epoch + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_INCREMENT)))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(multiplier)
    return numbers ^ (numbers >> np.uint64(_SHIFTS[-1]))
