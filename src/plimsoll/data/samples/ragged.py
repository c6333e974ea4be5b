"""Conversion between rows of different lengths in one flat array and a padded table.

All functions are a few numpy passes over the tokens, without Python loops over rows. Not handled: rows on a device.

Shapes: B rows, T columns, N elements in all rows together.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_PAD_MULTIPLES = (8, 4, 2, 1)  # row lengths are rounded up to one of these; some kernels work on blocks of 8
_MOST_ROUNDING_SHARE = 0.03

Element = TypeVar("Element", bound=np.generic)


def pad_multiple_for(lengths: NDArray[np.integer[Any]]) -> int:
    """Return 8, 4, 2 or 1: the largest multiple that adds at most 3 % to the tokens of rows of these lengths."""
    most_tokens = _MOST_ROUNDING_SHARE * lengths.sum()
    return next(multiple for multiple in _PAD_MULTIPLES if (multiple - 1) / 2 * len(lengths) <= most_tokens)


def some_ids(num_samples: int) -> NDArray[np.int64]:
    """Return the indices of at most 4096 evenly spaced samples, whose lengths represent all samples."""
    return np.linspace(0, num_samples - 1, min(num_samples, 4096)).astype(np.int64)


def positions(lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each element in its row, (N,): 0, 1, 2, 0, 1 for the lengths 3 and 2."""
    return np.arange(lengths_B.sum()) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)


def places(starts_B: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the elements of all rows, end to end (N,): ``start, start + 1, ...`` of each row."""
    return np.repeat(starts_B, lengths_B) + positions(lengths_B)


def inside(lengths_B: NDArray[np.int64], num_columns: int) -> NDArray[np.bool_]:
    """Return whether each cell of a padded table (B, T) holds an element."""
    return np.arange(num_columns) < lengths_B[:, None]


def padded(flat_N: NDArray[Element], inside_BT: NDArray[np.bool_], fill: int) -> NDArray[Element]:
    """Return a table (B, T) with the elements in the cells where ``inside_BT`` is true, and ``fill`` elsewhere."""
    table_BT = np.full(inside_BT.shape, fill, flat_N.dtype)
    table_BT[inside_BT] = flat_N
    return table_BT
