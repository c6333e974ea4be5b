"""Buffers of which each of several ranks has its own: what an evaluation and a checkpoint make of them.

- The running statistics of BatchNorm are each rank's, of its part of the batches; where they are used, or kept, they
  are those of the first rank on all, as in torch's `DistributedDataParallel`.
- The state that is carried through a stream is known for the stream slots that a rank has; a checkpoint needs all of
  them, since another number of ranks has others.

With one process these do nothing. Does NOT cover other buffers that a model changes as it is trained: each rank keeps
its own of them, and a checkpoint has those of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plimsoll.distributed.ranks import Ranks
from plimsoll.models.recurrent.carried_state import CarriedState


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the running statistics of the first; all must call it."""
    for module in model.modules() if not ranks.is_alone else ():
        if isinstance(module, _BatchNorm):
            ranks.broadcast(list(module.buffers(recurse=False)))


def share_slots(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the carried state of all stream slots, of which each has those that its part of a batch has.

    Raises:
        PeerOutOfMemory: if memory ran out on another rank before it could tell its own.
    """
    for module in model.modules() if not ranks.is_alone else ():
        if isinstance(module, CarriedState):
            own = own_slots(module.training_state, ranks)
            ranks.require_all()
            module.training_state.copy_(ranks.add_up(own))


def own_slots(states: Tensor, ranks: Ranks) -> Tensor:
    """Return a copy on the CPU of states (2, stream slots, ...) in which the stream slots of other ranks are zeros."""
    own = torch.zeros(states.shape, dtype=states.dtype)
    own[:, ranks.rank :: ranks.world_size] = states[:, ranks.rank :: ranks.world_size].cpu()
    return own
