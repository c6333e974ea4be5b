"""A linear layer adds its bias in place, although a trace sees a sum of its own.

``at::linear`` (aten/src/ATen/native/Linear.cpp) multiplies and then adds the bias where it cannot do both at once:
where its input has more than two dimensions and is not contiguous, as the output of a recurrent layer with
``batch_first``. For tensors of a subclass, as fake ones are, and under a dispatch mode it adds out of place, which a
real training does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None or input.dim() == 2 or input.is_contiguous():
        result: Tensor = torch.ops.aten.linear.default.decompose(input, weight, bias)
        return result
    return torch.matmul(input, weight.t()).add_(bias)


LINEAR = {"linear": _linear}
