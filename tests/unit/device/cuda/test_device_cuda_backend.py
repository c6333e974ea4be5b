"""Properties that need a CUDA device: its numbers, its limit, its generator (run with ``pytest -m gpu``)."""

import pytest
import torch

from plimsoll.device.cuda.backend import CudaBackend
from plimsoll.errors import BudgetError, DeviceError

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def backend():
    backend = CudaBackend(0)
    backend.release()
    return backend


def test_a_number_beyond_the_last_device_is_refused():
    with pytest.raises(DeviceError, match="CUDA devices are visible to this process"):
        CudaBackend(torch.cuda.device_count())


def test_the_probe_describes_the_device(backend):
    device = backend.probe()
    assert device.name == torch.cuda.get_device_name(0)
    assert 0 < device.free_bytes <= device.capacity_bytes <= device.hardware_bytes


def test_the_counters_follow_an_allocation(backend):
    backend.reset_peak()
    before = backend.use()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    during = backend.use()
    assert during.used_bytes - before.used_bytes == 64 * MIB
    assert during.reserved_bytes >= during.used_bytes
    del block
    after = backend.use()
    assert after.used_bytes == before.used_bytes
    assert after.peak_bytes == during.used_bytes
    backend.release()
    assert backend.use().reserved_bytes < during.reserved_bytes


def test_the_limit_raises_a_recognised_error_holds_nested_and_is_undone(backend):
    assert backend.use().limit_bytes is None
    with backend.limited(2048 * MIB):
        outer = backend.use().limit_bytes
        with backend.limited(1024 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda:0")
        assert backend.oom_family(caught.value) == "cuda"
        assert backend.use().limit_bytes == outer <= 2048 * MIB
        torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda:0")
    assert backend.use().limit_bytes is None


def test_a_budget_below_what_is_used_or_above_the_device_is_refused(backend):
    kept = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:0")
    for budget_bytes in (256 * MIB, 1 << 50):
        with pytest.raises(BudgetError, match="give a budget between the two"), backend.limited(budget_bytes):
            pass
    assert kept.numel() == 512 * MIB


def test_the_devices_generator_repeats(backend):
    state = backend.random_state()
    first = torch.rand(4, device="cuda:0")
    backend.restore_random_state(state)
    assert torch.equal(torch.rand(4, device="cuda:0"), first)
