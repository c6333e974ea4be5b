"""Shards that are offered, and reasons for refusals. `tests/numerics/test_shards.py` tests training with them."""

from dataclasses import replace

import pytest
import torch
from tests.ranks_program import Stack, loss_of, stacked_model
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.errors import InputError
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.models.workload import Workload
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.techniques import TECHNIQUES, Setting, conflict_among, installed

SHARD = TECHNIQUES["fully_shard"]
ONCE = Choice(technique="fully_shard", options={"gathered": "once"})
NUM_BLOCKS = 3
SHARED = Setting(device="cpu", batch_size=4, num_ranks=4)


def workload_of(model: nn.Module | None = None, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Workload:
    model = stacked_model() if model is None else model
    return Workload(model, optimizer(model.parameters(), lr=0.1), loss_of, "samples")


def test_shards_are_offered_to_several_ranks_the_one_that_exchanges_less_first():
    available = SHARD.choices(workload_of(), SHARED)
    assert list(map(str, available)) == [
        "fully_shard=once",
        "fully_shard=twice",
        "fully_shard(gathered=twice,offload=disk)",
    ]
    on_cuda = SHARD.choices(workload_of(), replace(SHARED, device="cuda"))
    assert on_cuda[-1].options["offload"] == "host"
    assert "the job has 1 (`ranks`)" in SHARD.choices(workload_of(), Setting(device="cpu", batch_size=4))


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (workload_of(nn.Linear(6, 3)), "no repeated blocks"),
        (workload_of(optimizer=torch.optim.Adafactor), "an update of Adafactor may depend on other rows"),
    ],
)
def test_a_reason_is_said_where_a_model_cannot_be_shared_out(workload, reason):
    assert reason in SHARD.choices(workload, SHARED)


def test_parameters_are_gathered_in_the_precision_of_the_job():
    workload = workload_of()
    workload.precision = "bf16"
    in_half = SHARD.choices(workload, replace(SHARED, precision="bf16"))
    assert {choice.options["dtype"] for choice in in_half} == {"bf16"}
    assert [conflict_among((choice,), workload, SHARED) for choice in in_half] == [None] * 3
    either = SHARD.choices(workload_of(), replace(SHARED, precision="auto"))
    assert [choice.options.get("dtype") for choice in either] == [None] * 3 + ["bf16"] * 3
    reason = SHARD.conflicts(either[-1], (), workload_of(), replace(SHARED, precision="auto"))
    assert reason == "dtype is bf16, and the job does not compute in it: set `precision: bf16`"
    cast = Choice(technique="autocast", options={"dtype": "bf16"})
    assert SHARD.conflicts(either[-1], (cast,), workload_of(), replace(SHARED, precision="auto")) is None


class Single(Stack):
    """A model with a scalar parameter, which has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def shared_between(one: str, other: str) -> nn.Module:
    model = stacked_model()
    setattr(model.get_submodule(one), "weight", model.get_submodule(other).weight)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Single(), "scale is a single number and has no rows"),
        (shared_between("blocks.0.up", "blocks.1.up"), "blocks.0 and blocks.1 share a weight"),
        (shared_between("last", "blocks.1.up"), "a block shares a weight with a module outside the blocks"),
    ],
)
def test_a_model_that_torch_cannot_share_out_is_refused_before_it_is_tried(model, reason):
    assert reason in SHARD.choices(workload_of(model), SHARED)
    assert isinstance(SHARD.choices(workload_of(stacked_model(is_mixed=True)), SHARED), tuple)  # tied outside of blocks


def test_states_that_exist_are_refused():
    workload = workload_of()
    loss_of(workload.model, {"features": torch.ones(2, 6), "labels": torch.zeros(2, dtype=torch.long)}).backward()
    workload.optimizer.step()
    assert "states of 22 parameters already" in SHARD.choices(workload, SHARED)


def test_what_moves_whole_parameters_conflicts_and_what_cuts_the_batch_does_not():
    workload = workload_of()
    assert conflict_among((ONCE, micro_batch_choice(2)), workload, SHARED) is None
    moved = Choice(technique="parameter_offload", options={"gradients": False})
    assert "works on whole parameters" in SHARD.conflicts(ONCE, (moved,), workload, SHARED)
    states = Choice(technique="optimizer_offload", options={"to": "disk"})
    assert SHARD.conflicts(ONCE, (states,), workload, SHARED) is None
    assert "off the device already" in SHARD.conflicts(odd(offload="disk"), (states,), workload, SHARED)


def odd(**options: str) -> Choice:
    return Choice(technique="fully_shard", options={"gathered": "once"} | options)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (odd(gathered="never"), "give once or twice"),
        (odd(offload="host"), "offload is 'host': on cpu give disk, or none"),
        (odd(dtype="fp8"), "dtype is 'fp8': give bf16, fp16 or kept"),
    ],
)
def test_options_that_are_none_are_refused(choice, reason):
    assert reason in SHARD.conflicts(choice, (), workload_of(), SHARED)
    assert SHARD.conflicts(odd(offload="none", dtype="kept"), (), workload_of(), SHARED) is None


def test_one_rank_cannot_share_a_model_out():
    with pytest.raises(InputError, match=r"this training has 1: start several with --nproc"):
        installed(workload_of(), [ONCE]).__enter__()


def live_peak(precision: str, **options: str) -> int:
    """Return the peak of live bytes on one of two ranks, in a dry run; most of the model is its blocks."""
    model = {"architecture": "gpt2", "n_layer": NUM_BLOCKS, "n_embd": 256, "n_head": 4}
    fields = {"model": model, "data": "nowhere.txt", "sequence_length": 16, "batch_size": 2, "ranks": 2}
    job = Job.from_fields(fields | {"precision": precision})
    texts = TextSketch(vocab_size=100, num_labels=None, end_id=0)
    choices = (Choice(technique="fully_shard", options=options), micro_batch_choice(1))
    return live_bytes(dry_run_job(job, texts, CpuLowering(), choices)).peak_bytes


@pytest.mark.long
def test_each_way_leaves_less_on_the_device_than_the_one_before():
    once, in_half = live_peak("bf16", gathered="once"), live_peak("bf16", gathered="once", dtype="bf16")
    off = live_peak("bf16", gathered="twice", dtype="bf16", offload="disk")
    num_bytes = 4 * NUM_BLOCKS * 12 * 256 * 256
    assert once - in_half > num_bytes // 2  # of 4 bytes for each number that is gathered 2 are left, or fewer
    assert in_half - off > num_bytes  # this rank's half of parameters, gradients and two states, or most of it
