"""Dry runs of one rank without the other ranks: it communicates with nobody and needs the memory of a real rank."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.data.quick_facts import TextSketch
from plimsoll.distributed.reduction import _EXCHANGE_BYTES
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.work import WorkCounter, hearing
from plimsoll.planning.dry_run.ranks import dry_run_ranks, joined_alone, threads_of_rank
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_choice
from plimsoll.techniques.mechanisms import sharded

TEXTS = TextSketch(vocab_size=300, num_labels=None, end_id=0)


def peak_bytes(ranks: int, batch_size: int) -> int:
    job = Job.from_fields(
        {"model": "lstm", "data": "nowhere.txt", "sequence_length": 8, "batch_size": batch_size, "ranks": ranks}
    )
    choices = (micro_batch_choice(-(-batch_size // ranks)),)
    return live_bytes(dry_run_job(job, TEXTS, CpuLowering(), choices)).peak_bytes


def test_one_of_many_ranks_agrees_with_nobody_and_adds_up_its_own():
    with dry_run_ranks(64) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_alone) == (0, 64, False)
        assert (ranks.agree(False), ranks.agree(True)) == (False, True)
        assert ranks.add_up(torch.tensor([3.0])).tolist() == [3.0]
        assert ranks.each([3, 5])[0] == [3, 5]
        assert ranks.gather("a") == ranks.gather_agreed("a") == ["a"] * 64
    assert not dist.is_initialized()


def test_a_rank_of_a_real_training_cannot_dry_run_other_ranks():
    with joined_alone(), pytest.raises(InputError, match=r"cannot dry-run 3 ranks in a process that is rank 0 of 1"):
        dry_run_ranks(3).__enter__()
    assert not dist.is_initialized()


def test_each_rank_has_its_share_of_the_batch_and_what_the_exchange_takes():
    alone_bytes, shared_bytes = peak_bytes(1, 8), peak_bytes(4, 32)
    assert shared_bytes > alone_bytes  # the bucket
    assert shared_bytes < alone_bytes + _EXCHANGE_BYTES + (4 << 20)
    assert peak_bytes(4, 32) == peak_bytes(4, 29)  # ceil(29 / 4) is 8, too


@pytest.mark.parametrize(("said", "expected"), [(None, 1), ("7", "as before")])
def test_a_rank_computes_with_its_share_of_the_cores_unless_it_is_said(monkeypatch, said, expected):
    before = torch.get_num_threads()
    if said is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    with threads_of_rank(1):
        assert torch.get_num_threads() == before
    with threads_of_rank(4096):
        assert torch.get_num_threads() == (before if expected == "as before" else expected)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("num_ranks", "threads"), [(2, 3), (3, 2), (7, 1), (9, 1)])
def test_ranks_share_the_cores_that_the_process_may_use(monkeypatch, num_ranks, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(7)} if pid == 0 else {0})
    before = torch.get_num_threads()
    with threads_of_rank(num_ranks):
        assert torch.get_num_threads() == threads
    with threads_of_rank(1):
        assert torch.get_num_threads() == before


def test_an_exchange_moves_the_whole_tensor():
    with dry_run_ranks(4), hearing():
        counter = WorkCounter(lambda tensor: False)
        whole, part = torch.zeros(12), torch.zeros(3)
        with Counting(counter) as counting:
            dist.all_reduce(whole)
            sharded._all_gather(whole, part)
            sharded._reduce_scatter(part, whole)
    assert counting.moved == [
        ("c10d::allreduce_", 48),
        ("c10d::_allgather_base_", 48),
        ("c10d::_reduce_scatter_base_", 48),
    ]


class Counting(TorchDispatchMode):
    """A dispatch mode that records the bytes that communication ops move."""

    def __init__(self, counter):
        super().__init__()
        self._counter, self.moved = counter, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("c10d::"):
            self.moved.append((func._schema.name, self._counter.count(func, args, kwargs or {}, result).moved_bytes))
        return result
