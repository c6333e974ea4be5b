"""Products of one matrix for each group, with which mixtures of experts compute: their results on fake tensors.

torch's own rule for tensors without memory knows only bfloat16, while the kernels take every type: rows of the result
begin at multiples of 16 bytes. Does NOT cover scaled products (of 8 bits), which have an op of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

GROUPED = aten._grouped_mm.default

_ALIGNED_BYTES = 16


def grouped_result(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return what ``_grouped_mm`` makes, without computing: see `grouped_shape`."""
    shape = grouped_shape(a, b, offs)
    per_row = _ALIGNED_BYTES // a.element_size()
    padded = -(-shape[-1] // per_row) * per_row
    strides = (shape[-2] * padded, padded, 1)[-len(shape) :]
    made: Tensor = aten.empty_strided.default(shape, strides, dtype=a.dtype, device=a.device)
    return made


def grouped_shape(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """The shape of a result: groups lie along the rows of ``a``, the columns of ``b``, or what is summed over."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        return (offs.shape[0], a.shape[0], b.shape[1])
    if a.dim() == b.dim() == 3:
        return (a.shape[0], a.shape[1], b.shape[2])
    return (a.shape[-2], b.shape[-1])


def grouped_flops(a: Tensor, b: Tensor) -> int:
    """The operations of the products: each row that is in a group meets the matrix of its group only."""
    num_times = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * num_times * a.shape[-2] * a.shape[-1] * b.shape[-1]
