"""A number that identifies the content of a data set, to check when a run resumes that the data is unchanged.

It is a hash of the fingerprint of the data set, if it has one: ``fingerprint``, or ``_fingerprint`` of Hugging Face
`datasets`. Otherwise it is a hash of samples: all of them if they are few and small, else a selection from the whole
data set with the first and the last. Samples are read only if reading has no side effect. That holds for data sets with
``batch``, which returns the same samples each time, and for tensors. If worker processes read the data set, this
process reads no samples, unless reading is fast (``reads_fast``).

Not handled: other data sets, which may return random samples, and changes that miss the selected samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.order import shuffled

_MOST_SAMPLES, _MOST_BYTES = 4096, 16 << 20  # takes about 50 ms to read from memory
_SAMPLES_AT_ONCE = 16


def mark_of(dataset: Any, workers: Any) -> int | None:
    """Return a number that identifies the content of a data set, or ``None`` if its content cannot be determined.

    Args:
        dataset: the data set.
        workers: the number of worker processes that read it; 0 or ``None`` if this process does.
    """
    named = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(named, str):
        return zlib.crc32(named.encode())
    if workers and not getattr(dataset, "reads_fast", False):
        return None
    mark = num_bytes = 0
    for ids in _spread(len(dataset)):
        if hasattr(dataset, "batch"):
            fields = dataset.batch(ids, 0)
        elif isinstance(dataset, torch.utils.data.TensorDataset):
            fields = {str(number): tensor[ids] for number, tensor in enumerate(dataset.tensors)}
        else:
            return None
        for field in sorted(fields, key=_former):
            values = torch.as_tensor(fields[field]).detach().cpu().contiguous()
            said = f"{_former(field)} {values.dtype} {tuple(values.shape)}"
            mark = zlib.crc32(values.flatten().view(torch.uint8).numpy().data, zlib.crc32(said.encode(), mark))
            num_bytes += values.nbytes
        if num_bytes >= _MOST_BYTES:
            break
    return mark


def _spread(num_samples: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of the samples to hash, in groups: the first and last, then others from the whole data set."""
    numbers = np.unique(np.linspace(0, num_samples - 1, min(num_samples, _MOST_SAMPLES)).astype(np.int64))
    numbers = np.concatenate(([0, num_samples - 1], numbers[shuffled(len(numbers), 0)]))
    for begin in range(0, len(numbers), _SAMPLES_AT_ONCE):
        yield numbers[begin : begin + _SAMPLES_AT_ONCE]


def _former(field: str) -> str:
    """Return the name that a field had in the previous release.

    Fingerprints are computed from these names, so checkpoints of that release remain valid.
    """
    return {"slots": "lanes"}.get(field, field)
