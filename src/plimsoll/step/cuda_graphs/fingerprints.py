"""What tells whether two passes of the same samples are the same, without keeping a copy of what they computed.

A print of a tensor has a hash of its bits, which is equal for equal bits, and its sum and norm, which are near where
only rounding differs. Kernels that add in any order (atomics, on a GPU) give another rounding each time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""What rounding explains of the difference of two norms, as a share of them."""
_NO_NUMBER = -1.0  # in place of NaN, which is not equal to itself


class Print(NamedTuple):
    """What a tensor holds, without a copy of it: a hash of its bits, the sum of its numbers and their norm.

    ``most_difference`` is what rounding may change of a number, as a share of it.
    """

    bits: int
    total: float
    norm: float
    num_numbers: int
    most_difference: float

    def is_near(self, other: Print, largest_norm: float = 0.0) -> bool:
        """Whether the other differs by no more than rounding, of what is as large as ``largest_norm``."""
        most = self.most_difference * max(self.norm, other.norm, largest_norm)
        is_norm_near = abs(self.norm - other.norm) <= most
        return self == other or (is_norm_near and abs(self.total - other.total) <= most * self.num_numbers**0.5)


class PassPrint(NamedTuple):
    """Prints of the loss, of the gradients, and of what was written; and the state of random numbers afterwards."""

    loss: Print
    gradients: list[Print]
    written: list[Print]
    random_state: Any

    def is_near(self, other: PassPrint) -> bool:
        """Whether the other differs by no more than rounding; a gradient may be nothing but that (before BatchNorm)."""
        if (len(self.gradients), len(self.written)) != (len(other.gradients), len(other.written)):
            return False
        largest = max((one.norm for one in (*self.gradients, *other.gradients)), default=0.0)
        gradients = zip(self.gradients, other.gradients, strict=True)
        written = zip((self.loss, *self.written), (other.loss, *other.written), strict=True)
        return all(one.is_near(two, largest) for one, two in gradients) and all(
            one.is_near(two) for one, two in written
        )


def print_of(tensor: Tensor) -> Print:
    """Make the print of a tensor, which waits for its device."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.coalesce().values()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    if not dense.numel():
        return Print(0, 0.0, 0.0, 0, 0.0)
    bits, most = int(torch.hash_tensor(dense).view(torch.int64)), _MOST_DIFFERENCE.get(dense.dtype, 0.0)
    if not dense.is_floating_point():
        return Print(bits, float(dense.sum()), 0.0, dense.numel(), most)
    kind = torch.promote_types(dense.dtype, torch.float32)
    numbers = float(dense.sum(dtype=kind)), float(torch.linalg.vector_norm(dense, dtype=kind))
    total, norm = (_NO_NUMBER if math.isnan(one) else one for one in numbers)
    return Print(bits, total, norm, dense.numel(), most)
