"""Sparse gradients: the rows that an update changes, and clipping.

An embedding table with sparse gradients may be larger than the device memory. So, to be able to undo an update, only
the rows that it changes are copied. SparseAdam, Adagrad and SGD without momentum of ``torch.optim`` change only the
rows of the gradient, in the parameter and in states of its shape. For other optimizers, and optimizers with step hooks,
everything is copied, as for a dense parameter.

Shapes: U distinct rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.models.optimizers import is_separable

_SPARSE_FACTOR = 2  # SparseAdam allocates five temporaries and one more to coalesce, dense optimizers mostly three


def is_sparse(parameter: Tensor) -> bool:
    """Return whether a parameter has a sparse gradient."""
    return parameter.grad is not None and parameter.grad.layout is torch.sparse_coo


def changed_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the distinct rows, `(U,) int64`, that an update of this group changes; ``None`` if it may change all."""
    if not is_sparse(parameter) or not is_separable(optimizer):
        return None
    if type(optimizer) not in (torch.optim.SparseAdam, torch.optim.Adagrad) and not has_no_states(optimizer, group):
        return None
    assert parameter.grad is not None
    rows_U: Tensor = torch.unique(parameter.grad._indices()[0])
    return rows_U


def has_no_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether an update is known to create no states."""
    return type(optimizer) is torch.optim.SGD and not group["momentum"]


def bytes_updated(parameter: Tensor) -> int:
    """Return the bytes from which the size of an update's temporaries is estimated.

    For a dense gradient, these are `dense_bytes`; for a sparse gradient, a multiple of the gradient's bytes.
    """
    if not is_sparse(parameter):
        return dense_bytes(parameter)
    assert parameter.grad is not None
    return _SPARSE_FACTOR * bytes_of(parameter.grad)


def dense_bytes(parameter: Tensor) -> int:
    """Return the bytes from which the size of a parameter's optimizer states is estimated, as a multiple.

    These are the bytes of the parameter, or of its dense gradient if the gradient has a wider dtype.
    """
    gradient = parameter.grad
    return parameter.nbytes if gradient is None or is_sparse(parameter) else max(parameter.nbytes, gradient.nbytes)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a sparse tensor, of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def clippable(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return tensors for ``clip_grad_norm_``, which does not accept sparse gradients.

    A parameter with a sparse gradient is replaced by a tensor whose gradient shares the sparse gradient's values. The
    gradient is coalesced first, because the norm of a row that occurs twice is the norm of the sum.
    """
    return [_stand_in(parameter) if is_sparse(parameter) else parameter for parameter in parameters]


def _stand_in(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad._values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in
