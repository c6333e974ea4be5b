"""A dry run of one of several ranks, without the other ranks or their machines.

The code is the code of a real rank. Collectives use torch's fake process group, which returns at once and moves
nothing. A sum over ranks is therefore the value of this rank alone, and gathered values are copies of its value. The
tensors of a collective have the same shapes as in a real one.

One process stands for rank 0, which has the most samples of each batch. Not covered: the seconds of a collective, and a
process that has joined a real process group.

Source: `torch.testing._internal.distributed.fake_pg`, which torch's memory estimates for FSDP2 use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError


@contextmanager
def joined_alone() -> Iterator[None]:
    """Make this process the only rank of a gloo process group while the block runs, with gloo's memory allocated."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="gloo"))
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def threads_of_rank(num_ranks: int) -> Iterator[None]:
    """Set torch's number of threads while the block runs, as in a rank that `plimsoll.distributed.launch` starts here.

    If ``OMP_NUM_THREADS`` is set, or there is one rank, the number is unchanged.
    """
    before = torch.get_num_threads()
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // num_ranks, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def dry_run_ranks(world_size: int) -> Iterator[Ranks]:
    """Make this process rank 0 of ``world_size`` fake ranks while the block runs.

    Raises:
        InputError: if this process is a rank of a real training.
    """
    if dist.is_initialized():
        raise InputError(
            f"cannot dry-run {world_size} ranks in a process that is rank {dist.get_rank()} of {dist.get_world_size()}"
            ": use a separate process, or predict and plan before torch.distributed.init_process_group"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        ranks = Ranks()
        ranks.world_size = world_size  # its collectives use the default group, which is the fake one
        # Fake tensors cannot be pickled.
        ranks.gather = ranks.gather_agreed = lambda value: [value] * world_size  # type: ignore[method-assign]
        yield ranks
    finally:
        dist.destroy_process_group()
