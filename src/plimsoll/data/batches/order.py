"""The shuffled order of every epoch, computed from (seed, epoch, position) without a list or a state.

`Order` draws every sample from the whole data set. `BlockOrder` draws blocks of consecutive samples, for files larger
than the page cache. Then a file is read once per epoch, instead of one page per sample. `uniform` draws numbers for the
elements of a sample. They depend on the index of the sample, not on its batch, worker or order.

All arithmetic is in unsigned 64-bit integers, so the order is the same on every machine. It is random enough for
training, but NOT for cryptography.

Shapes: B samples; N elements of all samples together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged

_ROUNDS = 12  # each round changes half of the bits; with 8, some orders of 5 samples are twice as frequent as others
_NUMBERS_PER_PASS = 1 << 14  # so that the arrays of a pass stay in the L2 cache
_POSITIONS_PER_PASS = 1 << 16
MASK64 = (1 << 64) - 1
# The finaliser and the increment of SplitMix64: Steele, Lea, Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195
INCREMENT, _MULTIPLIERS, _SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)


class Drawn(Protocol):
    """The order of the samples in each epoch."""

    num_samples: int
    seed: int

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Values that identify this order among all orders of the same number of samples."""
        ...

    def ids(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample indices at positions ``start`` to ``stop`` (exclusive) in the order of the epoch."""
        ...

    def positions(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of samples, given by index, in the order of the epoch."""
        ...


class Order:
    """A permutation of ``num_samples`` samples for each epoch."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._network = _Feistel(num_samples)

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Values that identify this order."""
        return "shuffled", self.seed

    def ids(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample indices at positions ``start`` to ``stop`` (exclusive) in the order of the epoch."""
        assert 0 <= start <= stop <= self.num_samples, (start, stop, self.num_samples)
        return self.at(epoch, np.arange(start, stop))

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at positions (0 to ``num_samples - 1``) in the order of the epoch."""
        keys = _round_keys(self.seed, epoch)
        return self._network.forth(positions.astype(np.uint64), keys).astype(np.int64)

    def positions(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of samples, given by index, in the order of the epoch. This is the inverse of `at`."""
        keys = _round_keys(self.seed, epoch)
        return self._network.back(samples.astype(np.uint64), keys).astype(np.int64)


class Unshuffled:
    """The samples in the order of their indices, in every epoch."""

    identity: tuple[str | int, ...] = ("as numbered",)

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def ids(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices from ``start`` to ``stop`` (exclusive)."""
        return np.arange(start, stop)

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions themselves, which equal the indices."""
        return positions

    def positions(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices themselves, which equal the positions."""
        return samples


@dataclass(frozen=True)
class BlockShuffle:
    """A shuffle that reads a file once per epoch, in blocks of ``block_samples`` consecutive samples.

    Samples are shuffled within a pool of ``pool_blocks`` blocks, which the page cache must hold. By default, for texts
    of 128 bytes, a pool is 256 blocks of 64 KiB, or 16 MiB in all. Powers of two are fastest.
    """

    block_samples: int = 512
    pool_blocks: int = 256


class BlockOrder:
    """A permutation for each epoch that shuffles blocks of consecutive samples, then the samples of each pool.

    Samples ``b * block_samples`` to ``(b + 1) * block_samples`` (exclusive) are block b; the last block may be short. A
    permutation of the blocks sets their order. Every ``pool_blocks`` consecutive blocks in this order form a pool, and
    another permutation shuffles the samples of the pool. The inverse of the permutation of the blocks gives the place
    of the short block.
    """

    def __init__(self, num_samples: int, seed: int, blocks: BlockShuffle) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._block_samples, self._pool_blocks = blocks.block_samples, blocks.pool_blocks
        num_blocks = -(-num_samples // blocks.block_samples)
        self._blocks = Order(num_blocks, derived_seed(seed, 1))
        self._pool_seed = derived_seed(seed, 2)
        self._num_missing = num_blocks * blocks.block_samples - num_samples  # samples that the short block lacks
        self._pool_places = blocks.pool_blocks * blocks.block_samples

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Values that identify this order."""
        return "shuffled in blocks", self.seed, self._block_samples, self._pool_blocks

    def ids(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample indices at positions ``start`` to ``stop`` (exclusive) in the order of the epoch."""
        assert 0 <= start <= stop <= self.num_samples, (start, stop, self.num_samples)
        ids = np.empty(stop - start, np.int64)
        hole = self._hole(epoch)
        position = start
        while position < stop:
            pool = (position + self._num_missing * (position >= hole)) // self._pool_places
            end = min(stop, self._begin(pool + 1, hole), position + _POSITIONS_PER_PASS)
            ids[position - start : end - start] = self._in_pool(epoch, pool, np.arange(position, end), hole)
            position = end
        return ids

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at positions (0 to ``num_samples - 1``) in the order of the epoch."""
        hole = self._hole(epoch)
        pools = (positions + self._num_missing * (positions >= hole)) // self._pool_places
        ids = np.empty(len(positions), np.int64)
        for pool in np.unique(pools).tolist():
            inside = np.flatnonzero(pools == pool)
            ids[inside] = self._in_pool(epoch, pool, positions[inside], hole)
        return ids

    def positions(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of samples, given by index, in the order of the epoch. This is the inverse of `at`."""
        hole = self._hole(epoch)
        places = self._blocks.positions(epoch, samples // self._block_samples) * self._block_samples
        places += samples % self._block_samples
        positions = places - self._num_missing * (places >= hole)
        for pool in np.unique(places // self._pool_places).tolist():
            inside = np.flatnonzero(places // self._pool_places == pool)
            within, begin = self._within(pool, hole)
            positions[inside] = begin + within.positions(epoch, positions[inside] - begin)
        return positions

    def _hole(self, epoch: int) -> int:
        """Return the position at which the short block (the last one by index) ends in the order of the epoch.

        In this class, a *place* is the position that a sample would have if the short block had full length. From the
        returned position on, positions are lower than places by the number of samples that the short block lacks.
        """
        slot = int(self._blocks.positions(epoch, np.array([self._blocks.num_samples - 1]))[0])
        return (slot + 1) * self._block_samples - self._num_missing

    def _begin(self, pool: int, hole: int) -> int:
        """Return the first position of a pool. For the index after the last pool, this is the number of samples."""
        place = min(pool * self._pool_places, self._blocks.num_samples * self._block_samples)
        return place - self._num_missing * (place > hole)

    def _within(self, pool: int, hole: int) -> tuple[Order, int]:
        """Return the order of the samples within a pool, and the first position of the pool."""
        begin = self._begin(pool, hole)
        return Order(self._begin(pool + 1, hole) - begin, derived_seed(self._pool_seed, pool)), begin

    def _in_pool(self, epoch: int, pool: int, positions: NDArray[np.int64], hole: int) -> NDArray[np.int64]:
        within, begin = self._within(pool, hole)
        places = begin + within.at(epoch, positions - begin)
        places += self._num_missing * (places >= hole)
        slots, offsets = places // self._block_samples, places % self._block_samples
        first = pool * self._pool_blocks
        blocks = self._blocks.ids(epoch, first, min(first + self._pool_blocks, self._blocks.num_samples))
        return blocks[slots - first] * self._block_samples + offsets


def drawn(num_samples: int, seed: int, shuffle: bool | BlockShuffle = True) -> Drawn:
    """Return the order of a data set: shuffled as a whole, shuffled in blocks, or not shuffled."""
    if isinstance(shuffle, BlockShuffle):
        return BlockOrder(num_samples, seed, shuffle)
    return Order(num_samples, seed) if shuffle else Unshuffled(num_samples, seed)


def derived_seed(seed: int, *numbers: int) -> int:
    """Return a new seed derived from ``seed`` and ``numbers``; different numbers give independent seeds."""
    state = np.array([seed & MASK64], np.uint64)
    for number in numbers:
        state = mixed(state + np.uint64((number + 1) * INCREMENT & MASK64))
    return int(state[0])


def shuffled(number: int, seed: int) -> NDArray[np.int64]:
    """Return a permutation of ``number`` indices, sorted by a hash. It is in memory, so ``number`` must be small."""
    return np.argsort(mixed(np.arange(number, dtype=np.uint64) + np.uint64(seed & MASK64)), kind="stable")


class _Feistel:
    """A keyed bijection of the numbers below ``num_numbers``, and its inverse.

    A Feistel network is a bijection of the numbers with b bits, for any round function. Here b is the smallest number
    of bits that holds ``num_numbers`` values.
    """

    def __init__(self, num_numbers: int) -> None:
        self._num_numbers = num_numbers
        num_bits = (num_numbers - 1).bit_length()
        self._low_bits = np.uint64(num_bits // 2)
        self._high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
        self._low_mask = np.uint64((1 << (num_bits // 2)) - 1)

    def forth(self, numbers: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        return self._walked(numbers, list(enumerate(keys)))

    def back(self, numbers: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        return self._walked(numbers, list(enumerate(keys))[::-1])

    def _walked(self, numbers: NDArray[np.uint64], rounds: list[tuple[int, np.uint64]]) -> NDArray[np.uint64]:
        # Cycle walking: results beyond the last number are passed again, on average fewer than two passes (Black and
        # Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, https://doi.org/10.1007/3-540-45760-7_9).
        results = self._passed(numbers, rounds)
        outside = np.flatnonzero(results >= self._num_numbers)
        while len(outside):
            results[outside] = self._passed(results[outside], rounds)
            outside = outside[results[outside] >= self._num_numbers]
        return results

    def _passed(self, numbers: NDArray[np.uint64], rounds: list[tuple[int, np.uint64]]) -> NDArray[np.uint64]:
        results = np.empty_like(numbers)
        for begin in range(0, len(numbers), _NUMBERS_PER_PASS):
            part = slice(begin, begin + _NUMBERS_PER_PASS)
            high, low = numbers[part] >> self._low_bits, numbers[part] & self._low_mask
            for number, key in rounds:
                if number % 2:
                    low ^= mixed(high + key) & self._low_mask
                else:
                    high ^= mixed(low + key) & self._high_mask
            results[part] = (high << self._low_bits) | low
        return results


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    of_epoch = mixed(np.array([epoch + 1], np.uint64)) + np.uint64(seed * INCREMENT & MASK64)
    return list(mixed(of_epoch + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(INCREMENT)))


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one pseudorandom number for each given number, as a function of only this number."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(multiplier)
    return numbers ^ (numbers >> np.uint64(_SHIFTS[-1]))


def sample_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the key of each sample (B,): a pseudorandom number that differs for each epoch and seed."""
    of_epoch = mixed(np.array([epoch + 1], np.uint64)) + np.uint64(seed * INCREMENT & MASK64)
    return mixed(mixed(of_epoch) + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(INCREMENT))


def uniform(keys_B: NDArray[np.uint64], purpose: int, lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a pseudorandom number from 0 to less than 1 for each element of each sample (N,).

    This takes about 10 ns per number. A numpy generator for each sample would take 10 us.

    Args:
        keys_B: the keys of the samples, from `sample_keys`.
        purpose: a number for the use of the draws; another purpose draws different numbers.
        lengths_B: the number of elements of each sample.
    """
    keys_B = mixed(keys_B + np.uint64((purpose + 1) * INCREMENT & MASK64))
    numbers_N = mixed(
        np.repeat(keys_B, lengths_B) + ragged.positions(lengths_B).astype(np.uint64) * np.uint64(INCREMENT)
    )
    return (numbers_N >> np.uint64(11)).astype(np.float64) * 2.0**-53
