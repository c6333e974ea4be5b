"""Numbers that look drawn at random, as functions of (seed, epoch, sample, purpose, position): no generator, no state.

So what a sample is changed to depends on nothing but these: not on the batch, the worker, the order or the machine. It
is SplitMix64's finaliser on a counter, some 10 ns a number, where to make a numpy generator per sample takes 10 us.
NOT for cryptography.

Shapes: B samples, N elements of all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.batches.order import INCREMENT, MASK64, mixed
from plimsoll.data.samples import ragged

_STEP = np.uint64(INCREMENT)


def sample_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a number for each sample (B,), another one in each epoch and for each seed."""
    of_epoch = mixed(np.array([epoch + 1], np.uint64)) + np.uint64(seed * INCREMENT & MASK64)
    return mixed(mixed(of_epoch) + (ids.astype(np.uint64) + np.uint64(1)) * _STEP)


def uniform(keys_B: NDArray[np.uint64], purpose: int, lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number from 0 to less than 1 for each element of each sample (N,).

    Args:
        keys_B: of the samples.
        purpose: what it is for: another purpose draws other numbers.
        lengths_B: how many each sample needs.
    """
    keys_B = mixed(keys_B + np.uint64((purpose + 1) * INCREMENT & MASK64))
    numbers_N = mixed(np.repeat(keys_B, lengths_B) + ragged.positions(lengths_B).astype(np.uint64) * _STEP)
    return (numbers_N >> np.uint64(11)).astype(np.float64) * 2.0**-53
