"""Many stretches of UTF-8 made into strings at once, by `pyarrow`: three times as fast as one by one.

The bytes are not copied before they become strings, and no memory of Arrow's own is taken. It does NOT look for where
texts end, which is the business of each format.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def strings(raw: bytes, begins_B: NDArray[np.int64], ends_B: NDArray[np.int64]) -> list[str]:
    """Return the stretches ``raw[begin:end]``, which follow each other, as strings.

    Raises:
        UnicodeDecodeError: if one is not UTF-8.
    """
    import pyarrow  # some 40 ms, which a training that reads tokens need not wait for

    borders = np.stack((begins_B, ends_B), axis=1).ravel()  # every second stretch is what lies between two texts
    array = pyarrow.LargeStringArray.from_buffers(
        max(len(borders) - 1, 0), pyarrow.py_buffer(borders), pyarrow.py_buffer(raw)
    )
    texts: list[str] = array.to_pylist()[::2]
    return texts
