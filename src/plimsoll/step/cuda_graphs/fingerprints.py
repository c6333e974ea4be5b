"""Fingerprints of passes, which tell whether two passes of the same samples are equal without keeping their results.

The fingerprint of a tensor has a hash of its bits, which is equal for equal bits. It also has a sum and a norm, which
are close if tensors differ only by rounding. GPU kernels that add in any order (atomics) round differently each time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest relative difference of two norms that rounding explains."""
_NO_NUMBER = -1.0  # replaces NaN, which is not equal to itself


class Print(NamedTuple):
    """A fingerprint of a tensor: a hash of its bits, the sum, norm and number of its elements.

    ``most_difference`` is the largest relative difference of two norms that rounding in this dtype explains.
    """

    bits: int
    total: float
    norm: float
    num_numbers: int
    most_difference: float

    def is_near(self, other: Print, largest_norm: float = 0.0) -> bool:
        """Return whether two tensors differ only by rounding, relative to their norms or ``largest_norm`` if larger."""
        most = self.most_difference * max(self.norm, other.norm, largest_norm)
        is_norm_near = abs(self.norm - other.norm) <= most
        return self == other or (is_norm_near and abs(self.total - other.total) <= most * self.num_numbers**0.5)


class PassPrint(NamedTuple):
    """Fingerprints of the loss, the gradients and written tensors, and the random state after the pass."""

    loss: Print
    gradients: list[Print]
    written: list[Print]
    random_state: Any

    def is_near(self, other: PassPrint) -> bool:
        """Return whether the results of another pass differ only by rounding.

        For gradients, the tolerance is relative to the largest norm of any gradient. A gradient before BatchNorm may
        consist of rounding errors only.
        """
        if (len(self.gradients), len(self.written)) != (len(other.gradients), len(other.written)):
            return False
        largest = max((one.norm for one in (*self.gradients, *other.gradients)), default=0.0)
        gradients = zip(self.gradients, other.gradients, strict=True)
        written = zip((self.loss, *self.written), (other.loss, *other.written), strict=True)
        return all(one.is_near(two, largest) for one, two in gradients) and all(
            one.is_near(two) for one, two in written
        )


def print_of(tensor: Tensor) -> Print:
    """Return the fingerprint of a tensor; this waits for its device."""
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
