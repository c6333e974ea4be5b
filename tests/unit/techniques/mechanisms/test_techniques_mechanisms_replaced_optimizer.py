"""Another optimizer in place of the user's: parameter groups, schedules, and the restored original."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

from plimsoll.models.workload import Workload, model_loss
from plimsoll.techniques import Setting
from plimsoll.techniques.mechanisms.replaced_optimizer import conflict, groups_for, obstacle, optimizer_replaced

ALLOWED = Setting(device="cpu", batch_size=8, allow=frozenset({"adafactor"}))


def workload_of(optimizer_class=torch.optim.AdamW, schedule_of=None, **options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "name": "first"},
        {"params": model[1].parameters(), "weight_decay": 0.5},
    ]
    optimizer = optimizer_class(groups, lr=0.2, **options)
    return Workload(model, optimizer, model_loss, "samples", schedule_of and schedule_of(optimizer))


def replacement(workload):
    return torch.optim.SGD(groups_for(workload.optimizer, ("lr", "weight_decay")))


def test_groups_keep_what_both_classes_know_and_what_is_the_users():
    workload = workload_of()
    first, second = replacement(workload).param_groups
    assert (first["lr"], first["weight_decay"], first["name"]) == (0.1, 0.01, "first")
    assert (second["lr"], second["weight_decay"]) == (0.2, 0.5)
    assert "betas" not in first
    assert [*map(id, first["params"])] == [*map(id, workload.optimizer.param_groups[0]["params"])]


def halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def sequence(optimizer):
    parts = [ConstantLR(optimizer, factor=0.5, total_iters=2), halving(optimizer)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize("schedule_of", [halving, sequence])
def test_a_schedule_goes_on_with_the_other_optimizer(schedule_of):
    plain = workload_of(torch.optim.SGD, schedule_of)
    workload = workload_of(schedule_of=schedule_of)
    old, rates = workload.optimizer, [group["lr"] for group in workload.optimizer.param_groups]
    with optimizer_replaced(workload, replacement(workload)):
        for _ in range(4):
            for one in (plain, workload):
                one.optimizer.step()
                one.schedule.step()
            found = [group["lr"] for group in workload.optimizer.param_groups]
            assert found == [group["lr"] for group in plain.optimizer.param_groups]
    assert workload.optimizer is workload.schedule.optimizer is old
    assert [group["lr"] for group in old.param_groups] == rates


def test_what_cannot_be_replaced_says_why():
    assert obstacle(workload_of()) is None
    assert obstacle(workload_of(torch.optim.Adam, amsgrad=True)) is None
    assert "the optimizer is SGD" in obstacle(workload_of(torch.optim.SGD))
    begun = workload_of()
    begun.model(torch.ones(1, 2)).sum().backward()
    begun.optimizer.step()
    assert "has states of 4 parameters" in obstacle(begun)
    sparse = nn.Embedding(2, 2, sparse=True)
    workload = Workload(sparse, torch.optim.Adam(sparse.parameters()), model_loss, "samples")
    assert "sparse gradients" in obstacle(workload)
    vector = nn.Linear(2, 2, dtype=torch.complex64)
    workload = Workload(vector, torch.optim.Adam(vector.parameters()), model_loss, "samples")
    assert "complex" in obstacle(workload)


def test_it_has_to_be_allowed():
    workload = workload_of()
    assert conflict("adafactor", (), workload, ALLOWED) is None
    assert conflict("adafactor", (), workload_of(torch.optim.SGD), ALLOWED) == obstacle(workload_of(torch.optim.SGD))
    forbidden = Setting(device="cpu", batch_size=8)
    assert conflict("adafactor", (), workload, forbidden) == "is lossy: allow it with `allow: [adafactor]`"
