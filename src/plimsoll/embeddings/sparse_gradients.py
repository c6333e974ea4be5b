"""Which optimizers of ``torch.optim`` take sparse gradients, with which settings: refused before a step would fail.

Read off torch 2.13, and compared with it in the tests. Does NOT judge optimizers that are not torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plimsoll.errors import InputError

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def refuse_wrong_gradients(optimizer: torch.optim.Optimizer, tables: Mapping[Tensor, str]) -> None:
    """Refuse an optimizer whose first step would fail for gradients being sparse, or dense.

    Args:
        optimizer: of any kind; only those of ``torch.optim`` are known.
        tables: names of the parameters that get sparse gradients, as of ``nn.Embedding(sparse=True)``.

    Raises:
        InputError: it names the parameter and the setting.
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
                "parameters have dense ones: use torch.optim.Adagrad or SGD for all of them, or leave these out"
            )
        if names and kind not in _TAKE_SPARSE:
            raise InputError(
                f"{kind.__name__} takes no sparse gradients, which {names[0]} has: use Adagrad, SGD or (for tables "
                "alone) SparseAdam, or an nn.Embedding with sparse=False"
            )
        if names and group.get("weight_decay"):
            raise InputError(
                f"weight_decay {group['weight_decay']:g} would change every row of {names[0]}, whose gradients are of "
                "some: set weight_decay=0, for it in a parameter group of its own, or for all"
            )
        if names and group.get("fused"):
            raise InputError(
                f"{kind.__name__} with fused=True takes no sparse gradients, which {names[0]} has: use fused=False"
            )
