"""Rows of different lengths laid end to end in one flat array, and back into a padded table: the arithmetic of both.

All of it is a few numpy passes over the tokens, none over the rows in Python. NOT covered: rows on a device.

Shapes: B rows, T columns, N elements of all rows.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_PAD_MULTIPLES = (8, 4, 2, 1)  # of the rows of a batch; there are kernels that work on blocks of 8
_MOST_ROUNDING_SHARE = 0.03

Element = TypeVar("Element", bound=np.generic)


def pad_multiple_for(lengths: NDArray[np.integer[Any]]) -> int:
    """Return 8, 4, 2 or 1: the largest to which rows of these lengths are rounded up for 3 % of their tokens."""
    most_tokens = _MOST_ROUNDING_SHARE * lengths.sum()
    return next(multiple for multiple in _PAD_MULTIPLES if (multiple - 1) / 2 * len(lengths) <= most_tokens)


def some_ids(num_samples: int) -> NDArray[np.int64]:
    """Return the numbers of at most 4096 samples from end to end, whose lengths speak for all."""
    return np.linspace(0, num_samples - 1, min(num_samples, 4096)).astype(np.int64)


def positions(lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each element in its row, (N,): 0, 1, 2, 0, 1 for the lengths 3 and 2."""
    return np.arange(lengths_B.sum()) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)


def places(starts_B: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers from each start on, as many as its length says, end to end (N,)."""
    return np.repeat(starts_B, lengths_B) + positions(lengths_B)


def inside(lengths_B: NDArray[np.int64], num_columns: int) -> NDArray[np.bool_]:
    """Return which cells of a padded table (B, T) hold an element."""
    return np.arange(num_columns) < lengths_B[:, None]


def padded(flat_N: NDArray[Element], inside_BT: NDArray[np.bool_], fill: int) -> NDArray[Element]:
    """Return the elements in the cells that are inside, and ``fill`` in the others, (B, T)."""
    table_BT = np.full(inside_BT.shape, fill, flat_N.dtype)
    table_BT[inside_BT] = flat_N
    return table_BT
