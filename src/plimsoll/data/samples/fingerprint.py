"""A number that tells the content of a data set from another of the same length, for who goes on in the middle of it.

It is made of what the data set says of itself (``fingerprint``, or ``_fingerprint`` of Hugging Face `datasets`), else
of its samples: all where they are few and small, else some from all over the data, with the first and the last. These
are read where that has no effect but reading: of data sets with ``batch``, which gives the same for the same samples,
and of tensors; and only where no worker processes are to be the first to read. NOT covered: other data sets, which may
draw what they give, and changes that miss these samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.batches.order import shuffled

_MOST_SAMPLES, _MOST_BYTES = 4096, 16 << 20  # read in some 50 ms where samples are in memory
_SAMPLES_AT_ONCE = 16


def mark_of(dataset: Any, workers: Any) -> int | None:
    """Return the number, or ``None`` where nothing is known; ``workers`` is 0 if no other process reads."""
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
    """Yield the numbers of the samples to look at, a few at a time: the first, the last, and others from all over."""
    numbers = np.unique(np.linspace(0, num_samples - 1, min(num_samples, _MOST_SAMPLES)).astype(np.int64))
    numbers = np.concatenate(([0, num_samples - 1], numbers[shuffled(len(numbers), 0)]))
    for begin in range(0, len(numbers), _SAMPLES_AT_ONCE):
        yield numbers[begin : begin + _SAMPLES_AT_ONCE]


def _former(field: str) -> str:
    """The name of a field in the release before, whose checkpoints keep the number."""
    return {"slots": "lanes"}.get(field, field)
