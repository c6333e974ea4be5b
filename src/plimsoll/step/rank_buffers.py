"""Buffers that differ between ranks, and how they are combined for evaluations and checkpoints.

- BatchNorm's running statistics cover a rank's part of each batch. For evaluations and checkpoints, all ranks use the
  statistics of the first rank, as in torch's `DistributedDataParallel`.
- A rank knows the carried state of its own stream slots. A checkpoint needs the state of all slots, because another
  number of ranks distributes them differently.

With one process these functions do nothing. Other buffers that training changes are not handled: each rank keeps its
own version, and a checkpoint has the first rank's version.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plimsoll.distributed.ranks import Ranks
from plimsoll.models.recurrent.carried_state import CarriedState


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Copy the running statistics of the first rank to all ranks. All ranks must call it."""
    for module in model.modules() if not ranks.is_alone else ():
        if isinstance(module, _BatchNorm):
            ranks.broadcast(list(module.buffers(recurse=False)))


def share_slots(model: nn.Module, ranks: Ranks) -> None:
    """Copy the carried state of each stream slot from the rank that has it to all ranks. All ranks must call it.

    Raises:
        PeerOutOfMemory: if memory ran out on another rank before it could share its state.
    """
    for module in model.modules() if not ranks.is_alone else ():
        if isinstance(module, CarriedState):
            own = own_slots(module.training_state, ranks)
            ranks.require_all()
            module.training_state.copy_(ranks.add_up(own))


def own_slots(states: Tensor, ranks: Ranks) -> Tensor:
    """Return a CPU copy of ``states`` (2, stream slots, ...) in which the stream slots of other ranks are zero."""
    own = torch.zeros(states.shape, dtype=states.dtype)
    own[:, ranks.rank :: ranks.world_size] = states[:, ranks.rank :: ranks.world_size].cpu()
    return own
