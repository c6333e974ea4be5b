"""Every backend that this machine has keeps the promises of `Backend`."""

import inspect

import pytest
import torch

from plimsoll.device.base import Backend, backend_for
from plimsoll.errors import BudgetError
from plimsoll.records.device import Device

MIB = 1 << 20
_NAMES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_NAMES)
def backend(request):
    return backend_for(request.param)


def _methods():
    return [name for name, value in vars(Backend).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", _methods())
def test_a_method_takes_what_the_contract_says_and_is_documented(backend, name):
    method, promised = getattr(type(backend), name), getattr(Backend, name)
    assert list(inspect.signature(method).parameters) == list(inspect.signature(promised).parameters)
    assert inspect.getdoc(method)


def test_the_probe_is_a_record_of_the_same_kind(backend):
    device = backend.probe()
    assert device.kind == backend.kind
    assert Device.from_json(device.to_json()) == device
    assert 0 < device.free_bytes <= device.capacity_bytes <= device.hardware_bytes


def test_use_grows_by_what_is_kept_and_the_peak_stays_until_the_reset(backend):
    backend.reset_peak()
    before = backend.use()
    kept = torch.ones(16 * MIB, device=backend.kind)  # 64 MiB
    backend.synchronize()
    during = backend.use()
    assert during.used_bytes - before.used_bytes >= 63 * MIB
    assert during.peak_bytes >= during.used_bytes - MIB
    assert during.reserved_bytes >= during.used_bytes
    del kept
    backend.release()
    after = backend.use()
    assert after.used_bytes < during.used_bytes - 32 * MIB
    assert after.peak_bytes >= during.used_bytes - MIB
    backend.reset_peak()
    assert backend.use().peak_bytes < during.used_bytes - 32 * MIB


def test_a_limit_raises_an_error_that_is_recognised_and_is_gone_afterwards(backend):
    in_use = max(backend.use().used_bytes, backend.use().reserved_bytes)
    budget_bytes = in_use + 1024 * MIB
    too_many_bytes = 2 * budget_bytes  # if an allocator has reserved much, data may exceed the budget by as much
    with backend.limited(budget_bytes):
        assert backend.use().limit_bytes is not None
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            torch.empty(too_many_bytes, dtype=torch.uint8, device=backend.kind)
        assert backend.oom_family(caught.value) is not None
        torch.ones(64 * MIB, dtype=torch.uint8, device=backend.kind)
    assert backend.use().limit_bytes is None
    torch.empty(too_many_bytes, dtype=torch.uint8, device=backend.kind)


@pytest.mark.parametrize("budget_bytes", [MIB, 1 << 50])
def test_a_budget_that_cannot_be_enforced_is_refused(backend, budget_bytes):
    kept = torch.ones(16 * MIB, device=backend.kind)
    with pytest.raises(BudgetError, match="cannot limit"), backend.limited(budget_bytes):
        pass
    assert backend.use().limit_bytes is None
    assert kept.numel() == 16 * MIB


def test_the_baseline_is_the_smallest_budget_that_can_be_enforced(backend):
    backend.baseline_bytes()  # starts the counters
    with backend.limited(backend.baseline_bytes() + 4 * MIB):  # other tests' threads may allocate a little in between
        pass
    too_small_bytes = backend.baseline_bytes() - 4 * MIB  # counted again: a limit makes the heap return memory
    with pytest.raises(BudgetError, match="cannot limit"), backend.limited(too_small_bytes):
        pass


def test_the_error_of_a_size_no_machine_has_is_recognised(backend):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=backend.kind)
    assert backend.oom_family(caught.value) is not None
    assert backend.oom_family(RuntimeError("shapes differ")) is None


def test_random_numbers_repeat_after_a_restore(backend):
    def draw():
        return torch.rand(4, device=backend.kind).tolist(), torch.rand(4).tolist()

    state = backend.random_state()
    first = draw()
    assert draw() != first
    backend.restore_random_state(state)
    assert draw() == first
