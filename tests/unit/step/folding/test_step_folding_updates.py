"""Folding of alike chunks of an update: the trace equals the trace of running each chunk."""

from functools import partial

import pytest
import torch

from folded_traces import all_run, written_out
from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.repeated import Stretch
from plimsoll.models.workload import model_loss
from plimsoll.planning.dry_run.step import dry_run_job, dry_run_step
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.folding.updates import FoldedUpdates
from plimsoll.step.update import commit
from plimsoll.techniques import in_order
from technique_trainings import setup_for

LOWERINGS = {"cpu": CpuLowering(), "cuda": CudaLowering((8, 6))}
TEXTS = TextSketch(vocab_size=300, num_labels=None, end_id=0)
OPTIMIZERS = {
    "adamw": {"amsgrad": True}, "sgd": {}, "adafactor": {}, "adagrad": {}, "rprop": {}, "nadam": {}, "radam": {},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "asgd": {"t0": 1},  # from the second update on, it averages parameters
}  # fmt: skip
TECHNIQUES = {
    "optimizer_kernel": {"kernel": "fused"}, "low_bit_optimizer": {"bits": 8}, "lora": {"rank": 2, "alpha": 2},
    "checkpointing": {"blocks": "all"},
}  # fmt: skip


@pytest.fixture
def small_pieces(monkeypatch):
    """Give every parameter a separate chunk."""
    monkeypatch.setattr(commit, "_CHUNK_BYTES", dict.fromkeys(LOWERINGS, 1))


def folded_and_run(trace, monkeypatch):
    """Return the folded trace, the number of folded chunks, and the trace of running all chunks."""
    num_noted, again = 0, Stretch.again

    def counted(stretch, ended=(), renamed=None):
        nonlocal num_noted
        num_noted += bool(ended)
        return again(stretch, ended, renamed)

    trace()  # a warm-up: the first trace imports modules and fills caches of torch
    with monkeypatch.context() as patch:
        patch.setattr(Stretch, "again", counted)
        folded = trace()
    return folded, num_noted, all_run(monkeypatch, trace)


def job(optimizer, **changes):
    model = {"architecture": "gpt2", "n_layer": 3, "n_embd": 16, "n_head": 2}
    fields = {"model": model, "data": {"train": "nowhere.txt"}, "sequence_length": 16, "batch_size": 4}
    return Job.from_fields(fields | {"optimizer": optimizer} | changes)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("target", LOWERINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trace_of_an_update_is_that_of_all_its_pieces(name, target, monkeypatch):
    one = job({"name": name, "lr": 1e-3, **OPTIMIZERS[name]}, precision="fp16" if name == "sgd" else "bf16")
    trace = partial(dry_run_job, one, TEXTS, LOWERINGS[target], (micro_batch_choice(4),))
    folded, num_noted, run = folded_and_run(trace, monkeypatch)
    assert num_noted > 3 * 20  # of 40 parameters, of few kinds, in each of three steps
    assert written_out(folded) == written_out(run)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("target", LOWERINGS)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_trace_with_a_technique_is_that_of_all_its_pieces(name, target, monkeypatch):
    choices = in_order([micro_batch_choice(2), Choice(technique=name, options=TECHNIQUES[name])])
    trace = partial(dry_run_job, job({"name": "adamw"}), TEXTS, LOWERINGS[target], choices)
    folded, _, run = folded_and_run(trace, monkeypatch)
    assert written_out(folded) == written_out(run)


@pytest.mark.usefixtures("small_pieces")
def test_parameters_that_have_been_updated_more_often_are_of_another_kind(monkeypatch):
    """RAdam needs more memory from its sixth update on."""
    setup = setup_for("gpt2", ["micro_batch"])
    model, _ = setup.fresh()
    optimizer, batch = torch.optim.RAdam(model.parameters()), setup.case.batches()[0]
    model_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    for number, state in enumerate(optimizer.state.values()):
        state["step"].fill_(number % 6)
    options = {"units": setup.case.units, "choices": (micro_batch_choice(8),), "clip_norm": None, "precision": "fp32"}
    trace = partial(dry_run_step, model, optimizer, batch, model_loss, LOWERINGS["cpu"], **options)
    folded, num_noted, run = folded_and_run(trace, monkeypatch)
    assert num_noted
    assert written_out(folded) == written_out(run)


def test_what_is_not_known_of_a_state_has_its_piece_run():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    assert FoldedUpdates(None, optimizer)._kind_of(0, parameter) is None  # the parameter is not a fake tensor
