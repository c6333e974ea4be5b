"""One of several ranks in a dry run: the others need not be there, nor their machines.

The code that runs is that of a real rank; what it exchanges goes to torch's fake process group, which answers at once
and moves nothing. So numbers that are added up are those of this rank alone, the others have what it has where values
are gathered, and what an exchange makes of tensors without memory is what a real one makes: the same tensors.

Covers one process that stands for the rank with most samples of each batch, rank 0. Does NOT cover the seconds that an
exchange takes, nor a process that has already met others.

Source: `torch.testing._internal.distributed.fake_pg`, which torch's own memory estimates for FSDP2 use.
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
    """Start all that a rank has for its exchanges on the processor, with nobody else, while the block runs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="gloo"))
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def threads_of_rank(num_ranks: int) -> Iterator[None]:
    """Compute with as many threads as each rank has that `plimsoll.distributed.launch` starts here, while the block
    runs.

    Where ``OMP_NUM_THREADS`` says how many they are to have, they have as many as this process.
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
    """Be rank 0 of so many, of which the others are not there, while the block runs.

    Raises:
        InputError: if this process is a rank of a real training.
    """
    if dist.is_initialized():
        raise InputError(
            f"cannot dry-run {world_size} ranks in a process that is rank {dist.get_rank()} of {dist.get_world_size()}"
            ": use a process of its own, or predict and plan before torch.distributed.init_process_group"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        ranks = Ranks()
        ranks.world_size = world_size  # its exchanges are those of the default group, which is the fake one
        # Fakes cannot be pickled.
        ranks.gather = ranks.gather_agreed = lambda value: [value] * world_size  # type: ignore[method-assign]
        yield ranks
    finally:
        dist.destroy_process_group()
