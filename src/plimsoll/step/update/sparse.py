"""Sparse gradients in a step: which rows an update changes, and how such gradients are clipped.

An embedding table with sparse gradients may be larger than the memory, so what undoes its update is a copy of the rows
that the update changes. Of ``torch.optim``, SparseAdam, Adagrad and SGD without momentum change the rows of the
gradient and no others, in the parameter and in the states of its shape. Does NOT cover other optimizers, and ones with
step hooks: of theirs everything is copied, as of a dense parameter.

Shapes: U different rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.models.optimizers import is_separable

_SPARSE_FACTOR = 2  # SparseAdam makes five temporaries and one to coalesce, `torch.optim` of dense ones mostly three


def is_sparse(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient, and it is sparse."""
    return parameter.grad is not None and parameter.grad.layout is torch.sparse_coo


def changed_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the rows, each once, that an update of this group changes; ``None`` where it may change all."""
    if not is_sparse(parameter) or not is_separable(optimizer):
        return None
    if type(optimizer) not in (torch.optim.SparseAdam, torch.optim.Adagrad) and not has_no_states(optimizer, group):
        return None
    assert parameter.grad is not None
    rows_U: Tensor = torch.unique(parameter.grad._indices()[0])
    return rows_U


def has_no_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether it is known that an update makes no states."""
    return type(optimizer) is torch.optim.SGD and not group["momentum"]


def bytes_updated(parameter: Tensor) -> int:
    """Count the bytes that the temporaries of an update are multiples of: those of the parameter where it is dense."""
    if not is_sparse(parameter):
        return dense_bytes(parameter)
    assert parameter.grad is not None
    return _SPARSE_FACTOR * bytes_of(parameter.grad)


def dense_bytes(parameter: Tensor) -> int:
    """Count the bytes that the states of an update are multiples of: a dense gradient may be of a wider type."""
    gradient = parameter.grad
    return parameter.nbytes if gradient is None or is_sparse(parameter) else max(parameter.nbytes, gradient.nbytes)


def bytes_of(tensor: Tensor) -> int:
    """Count the bytes of a tensor, of a sparse one those of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def clippable(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return what ``clip_grad_norm_`` clips in place of parameters: it takes no sparse gradients, but their values do.

    A row that is there twice counts as the sum, so the gradients of such parameters are coalesced.
    """
    return [_stand_in(parameter) if is_sparse(parameter) else parameter for parameter in parameters]


def _stand_in(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad._values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in
