"""A real training is recorded, and its memory counted."""

import pytest
import torch
from torch import nn

from plimsoll.errors import DeviceError
from plimsoll.memory.measure import Measurement, measure_training, measuring

MIB = 1 << 20


def train(run: Measurement) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    batch = run.know_batch({"x": torch.ones(3, 4)})
    for _ in range(2):
        model(batch["x"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_is_recorded_step_by_step():
    trace = measure_training(train)
    assert (trace.source, trace.lowered_to) == ("measured", "cpu")
    assert set(trace.ops.step) == {1, 2, 3}  # the second zero_grad is already the third step's
    of = dict.fromkeys(trace.storages.category, 0)
    for num_bytes, category in zip(trace.storages.num_bytes, trace.storages.category, strict=True):
        of[category] += num_bytes
    weights = (4 * 2 + 2) * 4
    assert of["inputs"] == 3 * 4 * 4
    assert (of["parameters"], of["gradients"], of["optimizer states"]) == (weights, 2 * weights, weights)


def test_the_device_counts_what_the_process_takes():
    with measuring() as run:
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
        before_end = run.counters
    assert kept.nbytes == 64 * MIB
    for counters in (before_end, run.counters):
        assert counters.peak_bytes - counters.baseline_bytes >= 63 * MIB
        assert counters.device == "cpu"
    first, *_, last = run.counters.samples
    assert last[1] - first[1] >= 63 * MIB
    assert run.allocator.events is None


def test_what_the_block_raises_is_not_held_back():
    runs = []

    def fail(run: Measurement) -> None:
        runs.append(run)
        raise ZeroDivisionError(torch.ones(2))

    with pytest.raises(ZeroDivisionError):
        measure_training(fail)
    assert len(runs[0].trace().storages.num_bytes) == 1
    assert len(runs[0].counters.samples) >= 2


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(DeviceError, match="there is no device 'tpu'"):
        measure_training(train, device="tpu")


@pytest.mark.gpu
def test_cudas_counters_and_record_agree():
    with measuring("cuda", with_allocator_record=True) as run:
        kept = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
    assert run.counters.peak_bytes >= kept.nbytes
    assert run.counters.reserved_bytes >= run.counters.peak_bytes
    assert run.allocator.events is not None
