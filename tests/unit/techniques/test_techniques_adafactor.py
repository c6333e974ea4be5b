"""Adafactor: the same training as in plain PyTorch, tiny states, and the user's optimizer restored afterwards."""

import pytest
import torch
from torch import nn

from plimsoll.data.quick_facts import TextSketch
from plimsoll.memory.live import live_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.recorder import Recorder
from plimsoll.models.workload import Workload, model_loss
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import TECHNIQUES, Setting, installed
from workloads import CASES, largest_relative_difference, plain_loop, weights_of

CHOICE = Choice(technique="adafactor")
FALLBACK = [CHOICE, micro_batch_choice(8)]
ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"adafactor"}))


def test_there_is_a_choice_also_where_it_is_not_allowed():
    model = nn.Linear(2, 2)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), model_loss, "samples")
    adafactor = TECHNIQUES["adafactor"]
    forbidden = Setting(device="cpu", batch_size=8)
    assert adafactor.choices(workload, forbidden) == (CHOICE,)
    assert "allow: [adafactor]" in adafactor.conflicts(CHOICE, (), workload, forbidden)
    assert adafactor.conflicts(CHOICE, (), workload, ALLOWED) is None
    workload.optimizer = torch.optim.SGD(model.parameters())
    assert "replaces Adam and AdamW" in adafactor.choices(workload, ALLOWED)


@pytest.mark.parametrize("fails", [(), (1,), (40,)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_with_it_is_the_plain_one_with_it_also_after_an_oom_in_the_update(case, fails):
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, clip_norm=1.0, fallbacks=[FALLBACK])
    step._commit._chunk_bytes = 1
    with armed("optimizer", *fails):
        for batch in case.batches():
            step(batch)
    plain_model, _ = case.fresh()
    # With this `eps` the learning rate is an absolute step, as in Adam.
    plain = torch.optim.Adafactor(plain_model.parameters(), lr=1e-2, weight_decay=1e-2, eps=(None, 1.0))
    plain_loop(case, plain_model, plain, [8] * 4)
    found = weights_of(model, step.workload.optimizer)
    assert largest_relative_difference(weights_of(plain_model, plain), found) == 0
    assert not optimizer.state


@pytest.mark.parametrize("rms", [1e-4, 0.02, 1.0])
def test_a_step_is_as_long_as_adams_whatever_the_size_of_the_weights(rms):
    """The first step of both optimizers is the learning rate times the sign of the gradient."""
    moved = []
    for choices in ([], [CHOICE]):
        weight = nn.Parameter(torch.full((4, 4), rms))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        workload = Workload(nn.ParameterList([weight]), optimizer, model_loss, "samples")
        with installed(workload, choices):
            weight.grad = torch.full((4, 4), 3.0)
            workload.optimizer.step()
        moved.append(rms - weight.mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)
    assert moved[1] == pytest.approx(1e-3, rel=1e-3)


def test_everything_is_as_it_was_afterwards():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, optimizer, model_loss, "samples")
    before = {**vars(optimizer)}
    groups = [dict(group) for group in optimizer.param_groups]
    with installed(workload, [CHOICE]):
        assert isinstance(workload.optimizer, torch.optim.Adafactor)
    assert workload.optimizer is optimizer
    assert vars(optimizer) == before
    assert optimizer.param_groups == groups


def job(**changes):
    model = {"architecture": "lstm", "embedding_size": 64, "hidden_size": 64}
    fields = {"model": model, "data": {"train": "nowhere.txt"}, "sequence_length": 8, "batch_size": 8}
    return Job.from_fields(fields | changes)


def state_bytes(trace):
    live = live_bytes(trace)
    return int(live.by_category["optimizer states"].max())


@pytest.mark.parametrize("lowering", [CpuLowering(), CudaLowering((8, 6))], ids=lambda one: one.name)
def test_its_states_are_as_large_as_predicted(lowering):
    """An n x m matrix has n + m elements of state, a vector its own size. Step counts have 4 bytes, on the host."""
    texts = TextSketch(vocab_size=300, num_labels=None, end_id=0)
    trace = dry_run_job(job(allow="adafactor"), texts, lowering, FALLBACK)
    case = CASES[2]
    model, optimizer = case.fresh()
    step = TrainStep(model, optimizer, units=case.units, fallbacks=[FALLBACK])
    with Recorder(phase=lambda: "optimizer") as recorder:
        recorder.step = 1
        step(case.batches()[0])
        recorder.know_optimizer(step.workload.optimizer)
    measured = sum(4 * sum(p.shape) if p.dim() > 1 else 4 * p.numel() for p in model.parameters())
    num_parameters = len(list(model.parameters()))
    assert state_bytes(recorder.trace("measured", "cpu")) == measured + 4 * num_parameters
    shapes = [(300, 64), (256, 64), (256, 64), (256,), (256,), (300, 64), (300,)]
    expected = sum(4 * sum(shape) for shape in shapes)
    assert state_bytes(trace) == expected + (4 * len(shapes) if lowering.kind == "cpu" else 0)
