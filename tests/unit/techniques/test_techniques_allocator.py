"""The settings of the CUDA allocator: choices, conflicts, and their part in the prediction."""

import pytest
import torch
from torch import nn

from plimsoll.device.cuda import allocator_settings
from plimsoll.memory.allocator.caching import CachingAllocator, replay
from plimsoll.models.workload import Workload, model_loss
from plimsoll.records.allocator import MIB
from plimsoll.records.plan import Choice
from plimsoll.techniques import Setting, installed
from plimsoll.techniques.allocator import Allocator
from plimsoll.techniques.mechanisms.allocators import allocator_rules

CUDA, CPU = (Setting(device=device, batch_size=4) for device in ("cuda", "cpu"))


def choice(**options):
    return Choice(technique="allocator", options=options)


GROWS = choice(expandable_segments=True)


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch):
    for name in (*allocator_settings.VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)


def workload(device="cpu"):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, optimizer, model_loss, "samples", device=torch.device(device))


def test_segments_that_grow_are_offered_on_cuda():
    assert Allocator().choices(workload(), CUDA) == (GROWS,)
    assert "`heap` sets up the C library's heap" in Allocator().choices(workload(), CPU)


def test_what_the_user_has_set_is_left_alone(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert "pytorch#193400" in Allocator().choices(workload(), CUDA)
    assert "pytorch#193400" in Allocator().conflicts(GROWS, (), workload(), CUDA)
    other = Allocator().conflicts(choice(roundup_power2_divisions=8), (), workload(), CUDA)
    assert other == "the environment sets max_split_size_mb:128 already"


@pytest.mark.parametrize(
    ("asked", "setting", "reason"),
    [
        (GROWS, CUDA, None),
        (choice(roundup_power2_divisions=8), CUDA, None),
        (choice(max_split_size_mb=128, roundup_power2_divisions=8), CUDA, None),
        (GROWS, CPU, "it is for CUDA"),
        (choice(), CUDA, "it is given no setting: give one of expandable_segments, max_split_size_mb"),
        (choice(backend="cudaMallocAsync"), CUDA, "it is given backend: give one of"),
        (choice(expandable_segments=True, max_split_size_mb=128), CUDA, "leak together (pytorch#193400)"),
        (choice(max_split_size_mb=5), CUDA, "max_split_size_mb is '5': give a whole number of MiB from 20 on"),
        (choice(roundup_power2_divisions=3), CUDA, "is not a power of two"),
    ],
)
def test_what_cannot_be_is_refused(asked, setting, reason):
    found = Allocator().conflicts(asked, (), workload(), setting)
    assert found == reason or reason in found


def test_what_is_simulated_with_them_reserves_less():
    """Two blocks of 7 MiB fill 14 of a 20 MiB segment: twelve need six segments, or 84 MiB in pages of 20 MiB."""
    deltas = [(number, 7 * MIB) for number in range(12)]
    plain, grown = (replay(deltas, CachingAllocator(allocator_rules(one))) for one in ((), (GROWS,)))
    assert (plain.peak_reserved_bytes, grown.peak_reserved_bytes) == (120 * MIB, 100 * MIB)
    limited = [replay(deltas, CachingAllocator(allocator_rules(one), 110 * MIB)).oom_at for one in ((), (GROWS,))]
    assert limited == [10, None]


def test_it_is_set_and_unset_where_the_training_is_on_cuda_only(monkeypatch):
    given = []
    monkeypatch.setattr(allocator_settings, "set_up", given.append)
    with installed(workload(), [GROWS]):
        assert given == []
    with installed(workload("cuda"), [choice(expandable_segments=True, roundup_power2_divisions=8)]):
        assert given == ["expandable_segments:True,roundup_power2_divisions:8"]
    assert given[1:] == ["expandable_segments:False,roundup_power2_divisions:1"]


def test_torch_takes_what_it_is_given():
    for key, default in (("max_split_size_mb", 128), ("roundup_power2_divisions", 8), ("expandable_segments", True)):
        with installed(workload("cuda"), [choice(**{key: default})]):
            pass
