"""A rank whose others are not there: it exchanges with nobody, and needs what a real one needs."""

import pytest
import torch
import torch.distributed as dist

from plimsoll.data.sketch import TextSketch
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.run.reduction import _EXCHANGE_BYTES
from plimsoll.run.rehearse import rehearse_job
from plimsoll.run.rehearsed_ranks import joined_alone, rehearsed_ranks

TEXTS = TextSketch(vocab_size=300, num_labels=None, end_id=0)


def peak_bytes(ranks: int, batch_size: int) -> int:
    job = Job.from_fields(
        {"model": "lstm", "data": "nowhere.txt", "sequence_length": 8, "batch_size": batch_size, "ranks": ranks}
    )
    choices = (micro_batch_choice(-(-batch_size // ranks)),)
    return live_bytes(rehearse_job(job, TEXTS, CpuLowering(), choices)).peak_bytes


def test_one_of_many_ranks_agrees_with_nobody_and_adds_up_its_own():
    with rehearsed_ranks(64) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_alone) == (0, 64, False)
        assert (ranks.agree(False), ranks.agree(True)) == (False, True)
        assert ranks.add_up(torch.tensor([3.0])).tolist() == [3.0]
        assert ranks.each([3, 5])[0] == [3, 5]
    assert not dist.is_initialized()


def test_a_rank_of_a_real_training_rehearses_no_other():
    with joined_alone(), pytest.raises(InputError, match=r"cannot rehearse 3 ranks in a process that is rank 0 of 1"):
        rehearsed_ranks(3).__enter__()
    assert not dist.is_initialized()


def test_each_rank_has_its_share_of_the_batch_and_what_the_exchange_takes():
    alone_bytes, shared_bytes = peak_bytes(1, 8), peak_bytes(4, 32)
    assert shared_bytes > alone_bytes  # the bucket
    assert shared_bytes < alone_bytes + _EXCHANGE_BYTES + (4 << 20)
    assert peak_bytes(4, 32) == peak_bytes(4, 29)  # ceil(29 / 4) is 8, too
