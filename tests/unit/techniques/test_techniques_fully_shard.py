"""What is offered of shards, and why not; what they train is in `tests/numerics/test_shards.py`."""

import pytest
import torch
from tests.ranks_program import loss_of, stacked_model
from torch import nn

from plimsoll.errors import InputError
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import TECHNIQUES, Setting, conflict_among, installed
from plimsoll.workload import Workload

SHARD = TECHNIQUES["fully_shard"]
ONCE = Choice(technique="fully_shard", options={"gathered": "once"})
SHARED = Setting(device="cpu", batch_size=4, num_ranks=4)


def workload_of(model: nn.Module | None = None, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Workload:
    model = stacked_model() if model is None else model
    return Workload(model, optimizer(model.parameters(), lr=0.1), loss_of, "samples")


def test_shards_are_offered_to_several_ranks_the_one_that_exchanges_less_first():
    menu = SHARD.menu(workload_of(), SHARED)
    assert [choice.options["gathered"] for choice in menu] == ["once", "twice"]
    assert "the job has 1 (`ranks`)" in SHARD.menu(workload_of(), Setting(device="cpu", batch_size=4))


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (workload_of(nn.Linear(6, 3)), "no repeated blocks"),
        (workload_of(optimizer=torch.optim.Adafactor), "Adafactor may look at more than one number at a time"),
    ],
)
def test_a_reason_is_said_where_a_model_cannot_be_shared_out(workload, reason):
    assert reason in SHARD.menu(workload, SHARED)


def test_states_that_exist_and_the_scaler_of_fp16_are_refused():
    workload = workload_of()
    workload.precision = "fp16"
    assert "use precision bf16" in SHARD.menu(workload, SHARED)
    workload = workload_of()
    loss_of(workload.model, {"features": torch.ones(2, 6), "labels": torch.zeros(2, dtype=torch.long)}).backward()
    workload.optimizer.step()
    assert "states of 22 parameters already" in SHARD.menu(workload, SHARED)


def test_what_moves_whole_parameters_conflicts_and_what_cuts_the_batch_does_not():
    workload = workload_of()
    assert conflict_among((ONCE, micro_batch_choice(2)), workload, SHARED) is None
    moved = Choice(technique="optimizer_offload", options={"to": "files"})
    assert "works on whole parameters" in SHARD.conflicts(ONCE, (moved,), workload, SHARED)
    odd = Choice(technique="fully_shard", options={"gathered": "never"})
    assert "give once or twice" in SHARD.conflicts(odd, (), workload, SHARED)


def test_one_rank_cannot_share_a_model_out():
    with pytest.raises(InputError, match=r"this training has 1: start several with --nproc"):
        installed(workload_of(), [ONCE]).__enter__()
