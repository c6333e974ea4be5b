"""The allocator's cache: emptied only on CUDA, only above the given line, and only after a step."""

import pytest
import torch
from torch import nn

from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.plan import Choice
from plimsoll.step.train_step import TrainStep
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.cache import Cache

CUDA, CPU = (Setting(device=device, batch_size=4) for device in ("cuda", "cpu"))


def choice(**options):
    return Choice(technique="cache", options=options)


def workload(device="cpu"):
    model = nn.Linear(2, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, optimizer, model_loss, "samples", device=torch.device(device))


def test_it_is_offered_on_cuda_to_be_pinned():
    assert "`heap` gives free pages back" in Cache().choices(workload(), CPU)
    assert Cache().choices(workload(), CUDA) == (choice(line_bytes=0),)
    assert not Cache().reaches


@pytest.mark.parametrize(
    ("asked", "setting", "reason"),
    [
        (choice(line_bytes=0), CUDA, None),
        (choice(line_bytes=1 << 30), CPU, "there is no such cache on a CPU; `heap` gives free pages back"),
        (choice(), CUDA, "line_bytes is None: give the reserved bytes above which the cache is emptied, 0 or more"),
        (choice(line_bytes=-1), CUDA, "line_bytes is -1: give the reserved bytes above which the cache is emptied"),
    ],
)
def test_a_pin_must_have_a_line(asked, setting, reason):
    found = Cache().conflicts(asked, (), workload(), setting)
    assert found == reason or found.startswith(reason)


def test_where_there_is_no_cuda_nothing_is_done():
    made = workload()
    step = TrainStep(made.model, made.optimizer, lambda model, batch: model(batch).sum(), units="samples")
    with installed(step.workload, [choice(line_bytes=0)]):
        step(torch.ones(4, 2))
        assert len(step.workload.hooks.after_step) == 1
    assert step.workload.hooks.after_step == ()


@pytest.mark.gpu
@pytest.mark.parametrize(("line_bytes", "is_emptied"), [(0, True), (8 << 30, False)])
def test_what_is_reserved_goes_back_above_the_line_only(line_bytes, is_emptied):
    made = workload("cuda")
    step = TrainStep(made.model, made.optimizer, lambda model, batch: model(batch).sum(), units="samples")
    step(torch.ones(4, 2))  # cuBLAS allocates its workspace now, and not from the block that is to be freed
    torch.empty(256 << 20, device="cuda")
    before = torch.cuda.memory_reserved()
    with installed(step.workload, [choice(line_bytes=line_bytes)]):
        step(torch.ones(4, 2))
    assert (before - torch.cuda.memory_reserved() >= 256 << 20) == is_emptied
