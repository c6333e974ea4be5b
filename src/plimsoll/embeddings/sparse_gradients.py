"""A check, before the first step, that an optimizer of ``torch.optim`` accepts sparse gradients with its settings.

The rules are from torch 2.13; tests compare them with torch. Optimizers outside ``torch.optim`` are NOT checked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plimsoll.errors import InputError

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def refuse_wrong_gradients(optimizer: torch.optim.Optimizer, tables: Mapping[Tensor, str]) -> None:
    """Raise an error if the optimizer's first step would fail because a gradient is sparse, or is not sparse.

    Args:
        optimizer: any optimizer; only those in ``torch.optim`` are checked.
        tables: the parameters with sparse gradients, such as the weight of ``nn.Embedding(sparse=True)``, with their
            names for the message.

    Raises:
        InputError: if the step would fail. The message names the parameter and the setting.
    """
    kind = type(optimizer)
    if kind not in vars(torch.optim).values():
        return
    for group in optimizer.param_groups:
        learning = [one for one in group["params"] if one.requires_grad]
        names = [tables[one] for one in learning if one in tables]
        if kind is torch.optim.SparseAdam and len(names) < len(learning):
            raise InputError(
                f"SparseAdam takes sparse gradients only, and {len(learning) - len(names)} of its {len(learning)} "
                "parameters have dense gradients: use torch.optim.Adagrad or SGD, or leave the dense ones out"
            )
        if names and kind not in _TAKE_SPARSE:
            raise InputError(
                f"{kind.__name__} takes no sparse gradients, which {names[0]} has: use Adagrad, SGD or (for tables "
                "alone) SparseAdam, or an nn.Embedding with sparse=False"
            )
        if names and group.get("weight_decay"):
            raise InputError(
                f"weight_decay {group['weight_decay']:g} would change every row of {names[0]}, but its gradients have "
                "only some rows: set weight_decay=0 for all, or for it in a separate parameter group"
            )
        if names and group.get("fused"):
            raise InputError(
                f"{kind.__name__} with fused=True takes no sparse gradients, which {names[0]} has: use fused=False"
            )
